"""Makes `tests/support` importable: small working implementations that several parts' tests use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
