"""`python -m cli VERB …`."""

import sys

from cli.main import main

sys.exit(main(sys.argv[1:]))
