"""A run's settings: the typed tree, its command line and its YAML files. Imports no torch.

``Config`` and its sections, ``ConfigError`` and the modules ``cli`` and ``yaml_file`` are for everybody.
"""

from engine.config.schema import Config, ConfigError, Data, Lora, Section

__all__ = ["Config", "ConfigError", "Data", "Lora", "Section"]
