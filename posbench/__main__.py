"""`python -m posbench` is `posbench`."""

import sys

from posbench.cli import main

sys.exit(main())
