"""The text of ``--help``: every key of the tree with its type, its description and its default."""

from __future__ import annotations

import argparse

from algorithms.registry import BUILT_IN
from engine.config import Section
from engine.config.keys import section_of, type_name

USAGE = f"python -m engine.run --algo {{{','.join(BUILT_IN)}}} [--config FILE.yaml] [--section.key value ...]"


def of(
    tree: type[Section],
    usage: str = USAGE,
    description: str = "Trains a language model by reinforcement learning from (human) feedback.",
    group: str = "run",
) -> str:
    """The help on a tree of settings, by default a run's, which has a section more for an algorithm of the user's own.

    By argparse, which serves for this alone: it takes -1e-3 for an option and says its errors in several lines.

    Args:
        group: what the settings outside of sections are called.
    """
    parser = argparse.ArgumentParser(
        usage=usage,
        description=description,
        epilog="A list reads a,b or [a, b], a mapping name=value,name=value or {name: value}; one item of a mapping is "
        "set by --reward.weights.model 0.5. Of a key given twice the last one holds.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    top = parser.add_argument_group(group)
    standard = ". Default: configs/quickstart.yaml" if group == "run" else ""
    top.add_argument(
        "--config",
        metavar="FILE.yaml",
        help=f"configuration file; its keys are those below, nested{standard}",
    )
    top.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration and exit; what is missing in it is said on stderr",
    )
    _add(parser, top, tree, "")
    return parser.format_help()


def _add(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, section: type[Section], prefix: str) -> None:
    """Adds a section's own leaves to its group, and a group for each section in it."""
    for name, field in section.model_fields.items():
        if (inner := section_of(field)) is not None:
            doc = (inner.__doc__ or "").strip()
            _add(parser, parser.add_argument_group(f"{prefix}{name}", doc), inner, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, [], {}) else f" (default: {default})"
        described = f"{field.description or ''}{shown}".replace("%", "%%")
        group.add_argument(f"--{prefix}{name}", metavar=type_name(field.annotation), help=described)
