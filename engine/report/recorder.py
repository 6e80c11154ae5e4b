"""The recorder: everything a run leaves behind for people, written by rank 0 as the loop goes."""

import math
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.machine import disk
from engine.report import records
from engine.report.display import make_display
from engine.report.html import write_report
from engine.report.output import Output
from engine.report.progress import Progress
from engine.report.trackers import Trackers


class Recorder:
    """Writes metrics.jsonl, samples.jsonl, TensorBoard events and, at the end, summary.json and the report.

    ``projects`` names experiment trackers by their packages, and the project of each; they get the metrics, too, and
    the run's ``settings``.

    A run that starts at step 0 starts new files (an earlier run's are kept as ``previous-…``). One that resumes drops
    what was recorded after ``start_step``, because it is about to record it again. ``live`` forces the live panel or
    the plain lines; by default a terminal gets the panel. Where nothing can be printed, all files are still written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        header: dict[str, Any],
        total_steps: int,
        start_step: int = 0,
        live: bool | None = None,
        projects: Mapping[str, str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.not_finite: dict[str, int] = {}
        self._failed_phase: str | None = None
        run_dir.mkdir(parents=True, exist_ok=True)
        metrics_path, samples_path = run_dir / records.METRICS, run_dir / records.SAMPLES
        for path in (metrics_path, samples_path, run_dir / records.NOTES):
            with disk.writing(path):
                if start_step > 0:
                    records.rewind(path, start_step)
                else:
                    records.set_aside(path)
        # Both tell how the run ended; it has just begun again.
        for name in (records.SUMMARY, records.CRASH):
            with disk.writing(run_dir / name):
                (run_dir / name).unlink(missing_ok=True)
        self._progress = Progress(total_steps, header, step=start_step)
        for record in records.read_lines(metrics_path):
            self._progress.remember({k: v for k, v in record.items() if k != "step" and v is not None})
        self._metrics = records.append_to(metrics_path)
        self._samples = records.append_to(samples_path)
        self._output = Output(sys.stdout)
        self._display = make_display(self._progress, self._output, live)
        self._display.open()
        self._tensorboard = self._open_tensorboard(start_step)
        self._trackers = Trackers(run_dir, projects or {}, settings or {}, start_step == 0, self.message)

    def _open_tensorboard(self, start_step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as problem:
            self.message(f"No TensorBoard events: {problem}")
            return None
        purge_step = start_step + 1 if start_step > 0 else 0
        threading.excepthook = _quiet_about_events
        try:
            return SummaryWriter(str(self.run_dir / records.TENSORBOARD), purge_step=purge_step)
        except OSError as problem:
            self.message(f"No TensorBoard events: {problem}")
            return None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show ``name`` as the phase in progress. Phases may nest."""
        outer = self._progress.phase
        self._progress.enter(name)
        try:
            yield
        except BaseException:
            self._failed_phase = self._failed_phase or name
            raise
        finally:
            self._progress.enter(outer)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record a finished training step."""
        self._progress.finish_step(step, self._record(step, metrics))
        self._display.step()

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Record an evaluation made after ``step``; it gets a line of its own in metrics.jsonl."""
        values = self._record(step, metrics)
        self._progress.remember(values)
        self._progress.evaluation = (step, values)
        self._display.evaluation()

    def _record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Write one line of metrics and return the finite ones; the others are null in the file, and counted."""
        values = {name: float(value) for name, value in metrics.items()}
        with disk.writing(self.run_dir / records.METRICS):
            self._metrics.write(records.json_line({"step": step, **values}) + "\n")
            self._metrics.flush()
        usable = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in values.keys() - usable.keys():
            if name not in self.not_finite:
                self.message(f"step {step}: {name} is {values[name]}")
            self.not_finite[name] = self.not_finite.get(name, 0) + 1
            self._progress.not_finite += 1
        if self._tensorboard is not None:
            try:
                for name, value in usable.items():
                    self._tensorboard.add_scalar(name, value, step)
            except OSError as problem:  # they are a copy of metrics.jsonl
                self.message(f"No more TensorBoard events: {problem}")
                self._tensorboard = None
        self._trackers.log(step, usable)
        return usable

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record some of the step's samples: prompt, response, reward, finish_reason, and whatever else is known."""
        with disk.writing(self.run_dir / records.SAMPLES):
            for row in rows:
                self._samples.write(records.json_line({"step": step, **row}) + "\n")
            self._samples.flush()

    def message(self, text: str) -> None:
        """Say something to whoever is watching."""
        self._display.message(text)

    def note(self, step: int, text: str) -> None:
        """Say something that the report must tell too; ``step`` is the first one that it is about."""
        self.message(text)
        with records.append_to(self.run_dir / records.NOTES) as file:
            file.write(records.json_line({"step": step, "note": text}) + "\n")

    def close(self, summary: dict[str, Any] | None = None, error: BaseException | None = None) -> None:
        """End the run: the display first, then the files, then the report, also when ``error`` ended it."""
        self._progress.ended = (
            "done" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "crashed"
        )
        self._end_files()
        try:
            if summary is not None:
                records.write_atomically(self.run_dir / records.SUMMARY, records.json_text(summary))
            if error is not None:
                records.write_atomically(self.run_dir / records.CRASH, self._crash_text(error))
        except OSError as problem:  # a full disk; the error itself is what is to be seen
            self.message(f"Could not be written: {problem}")
        try:
            report = write_report(self.run_dir)
        except Exception as problem:
            # Nothing that goes wrong in a drawing may turn a finished run into a failed one, or hide its real error.
            self.message(f"No report ({problem}); try again with: python -m engine.report {self.run_dir}")
            return
        if error is not None:
            self.message(
                f"{self._progress.ended.capitalize()} after step {self._progress.step}; the run so far: {report}"
            )

    def discard(self) -> None:
        """End a run that was refused: nobody will read its files."""
        self._progress.ended = "stopped"
        self._end_files()

    def _end_files(self) -> None:
        self._display.close()
        self._trackers.close(self._progress.ended == "done")
        for file in (self._metrics, self._samples, self._tensorboard):
            with suppress(OSError):  # what is still to be written finds no room
                if file is not None:
                    file.close()

    def say_last(self, text: str) -> None:
        """Print ``text`` below everything else, after ``close``: as it is, so that its paths can be copied."""
        self._output.line(text)

    def _crash_text(self, error: BaseException) -> str:
        """What happened, where in the run, and the traceback: in this order, for people who read one line."""
        where = f"After step {self._progress.step} of {self._progress.total_steps}"
        if self._failed_phase:
            where += f", during {self._failed_phase}"
        what = "".join(traceback.format_exception_only(error)).strip()
        return f"{what}\n{where}.\n\n{''.join(traceback.format_exception(error))}"


def _quiet_about_events(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread, which keeps its error for the next call and prints a traceback besides."""
    if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(failed)
