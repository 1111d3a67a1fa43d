"""`python -m allocscope.cli`: the command, where its script is not on PATH."""

import sys

from allocscope.cli.app import main

sys.exit(main())
