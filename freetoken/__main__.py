"""`python -m freetoken` is `ft`."""

import sys

from freetoken.cli import main

sys.exit(main())
