# SPDX-License-Identifier: Apache-2.0
"""The type checker of the import hook in `conftest.py`."""

import beartype

# As for static checkers, an int is a float.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
