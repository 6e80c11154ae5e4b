"""``python -m engine.from_async_rlhf``: see ``engine.from_async_rlhf.command_line``."""

import sys

from engine.from_async_rlhf.command_line import main

sys.exit(main())
