"""A run's settings, without torch: the typed tree, its command line and its YAML files.

Others import the names below, ``cli``, ``yaml_file``, ``numerics``, ``user_code``, ``user_algorithm``, ``quoted``,
``template_file``, of the tree's files ``schema``, ``inputs``, ``learning`` and ``running`` for single sections, and for
settings of their own ``keys`` and ``help_text``.
"""

from algorithms.base import Section
from engine.config.inputs import Data, Lora
from engine.config.schema import Config, ConfigError

__all__ = ["Config", "ConfigError", "Data", "Lora", "Section"]
