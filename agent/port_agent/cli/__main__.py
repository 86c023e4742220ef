import sys

from port_agent.cli import main

sys.exit(main())
