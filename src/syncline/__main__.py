"""`python -m syncline`, which is also what a rank's process runs."""

import sys

from syncline.cli.main import main

sys.exit(main())
