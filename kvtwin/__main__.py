"""`python -m kvtwin`."""

import sys

from kvtwin import main

sys.exit(main())
