"""`python -m posbench` is `posbench`."""

import sys

from posbench.cli.app import main

sys.exit(main())
