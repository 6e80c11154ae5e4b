"""The colours of curves, for report.html and for the pictures; people with colour blindness can tell them apart."""

COLOURS = {
    # The lines of a chart, in the order of its legend.
    "c0": ("#2a78d6", "#5aa2f2"),
    "c1": ("#d9610f", "#f0914f"),
    "c2": ("#1baf7a", "#3cc492"),
    # The phases of a step, as ``metrics.PHASES`` has them.
    "p0": ("#2a78d6", "#3987e5"),
    "p1": ("#a9b8c9", "#7d8ea3"),
    "p2": ("#00a3c4", "#22b5d6"),
    "p3": ("#7d5b3a", "#a98563"),
    "p4": ("#eda100", "#c98500"),
    "p5": ("#1baf7a", "#199e70"),
    "p6": ("#4a3aa7", "#9085e9"),
    "p7": ("#e87ba4", "#d55181"),
    "p8": ("#008300", "#2f9e2f"),
    "p9": ("#e34948", "#e66767"),
    "p10": ("#eb6834", "#d95926"),
    "p11": ("#8a8a84", "#85857f"),
}
"""By the class that a line or an area has in the page: on a white page, and on a dark one."""


def on_white(style: str) -> str:
    """The colour of a class on a white page, as in the pictures."""
    return COLOURS[style][0]


def style_sheet() -> str:
    """CSS that gives a line, an area or a legend's square of a class its colour, in a browser's scheme."""
    light, dark = (" ".join(f"--{style}: {pair[scheme]};" for style, pair in COLOURS.items()) for scheme in (0, 1))
    rules = [
        f".{style} {{ --color: var(--{style}); }} i.{style} {{ background: var(--{style}); }}" for style in COLOURS
    ]
    return "\n".join(
        [f":root {{ {light} }}", f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}", *rules, ""]
    )
