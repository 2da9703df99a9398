"""`python -m innet_drl` is `innet-drl`."""

import sys

from innet_drl.cli import main

sys.exit(main())
