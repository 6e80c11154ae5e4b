"""What a person sees of a run: the live line, the files of the run folder, and report.html."""

from engine.report.closing import closing_lines
from engine.report.html import write_report
from engine.report.recorder import Recorder

__all__ = ["Recorder", "closing_lines", "write_report"]
