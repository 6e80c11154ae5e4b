"""``python -m engine.serve_reward runs/x --port 8000``: a reward model as the server that ``reward.url`` asks."""

from __future__ import annotations

import functools

from engine.config import cli
from engine.evaluation import checks, command, places, settings
from engine.evaluation.reward_server import RewardServer
from engine.machine import children, devices

USAGE = "python -m engine.serve_reward MODEL_OR_RUN [--port 8000] [--section.key value ...]"
ABOUT = (
    "Serves a reward model over HTTP, for reward.url of runs, evaluate and relabel: a sequence classifier with one "
    "label, or the run that trained it. Requests that come at once are scored together."
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; 0 when it was stopped, 2 for what cannot work, in one line."""
    return command.run(_serve, argv)


def _serve(argv: list[str]) -> None:
    options = cli.read_options(argv)
    place = None if options.help else places.model(command.only_word(options.words, USAGE))
    below = settings.of_run(settings.ServeReward, cli.load_run(place.run_dir)) if place and place.run_dir else {}
    given = settings.read(settings.ServeReward, options, below, usage=USAGE, description=ABOUT)
    assert place is not None
    checks.check_scores(place)
    config = settings.as_config(given, place.path)
    device = devices.device_type(config)
    say = functools.partial(print, flush=True)  # it is heard while the server runs, through a pipe too
    server = RewardServer(given.host, given.port)
    try:
        command.prepare_libraries(device)
        from engine.evaluation import sampling, serving

        with sampling.as_folder(place, say) as folder:
            serving.serve(settings.as_reward_model(config, folder), device, server, say)
    except KeyboardInterrupt:
        say("stopped")
    finally:
        server.stop()


if __name__ == "__main__":
    children.run(main)
