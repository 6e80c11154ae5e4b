"""What a person sees of a run: the live line, the files of metrics and samples, report.html and the pictures.

Others import the names below and the modules ``records`` (a folder's files), ``recorder``, ``html``, ``closing``,
``output``, and for pages and pictures of their own ``curves``, ``curve_colours``, ``svg``, ``figures``, ``style`` and
``format``.
"""

from engine.report.closing import closing_lines
from engine.report.html import write_report
from engine.report.recorder import Recorder

__all__ = ["Recorder", "closing_lines", "write_report"]
