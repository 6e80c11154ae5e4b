"""A run's settings: the typed tree, its command line and its YAML files. Imports no torch.

``Config`` and its sections, ``ConfigError`` and the modules ``cli``, ``numerics``, ``user_code`` and ``yaml_file`` are
for everybody.
"""

from algorithms.base import Section
from engine.config.inputs import Data, Lora
from engine.config.schema import Config, ConfigError

__all__ = ["Config", "ConfigError", "Data", "Lora", "Section"]
