"""`python -m echo_launch`: the same as the command `echo-launch`."""

import sys

from echo_launch.main import main

sys.exit(main())
