"""`python -m fivefold` is the same as the command `fivefold`."""

import sys

from fivefold.cli import main

sys.exit(main())
