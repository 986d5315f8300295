"""`python -m syncline`, which is also what a rank's process runs."""

import sys

from syncline.cli import main

sys.exit(main())
