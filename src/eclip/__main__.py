"""``python -m eclip`` is ``eclip``."""

from eclip.cli import main

main()
