"""``python -m engine.from_async_rlhf``: see ``engine.from_async_rlhf.translation``."""

import sys

from engine.from_async_rlhf.translation import main

sys.exit(main())
