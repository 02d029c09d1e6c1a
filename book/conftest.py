"""For nbval: a progress bar appears on slow machines only, so it must not become an output that is compared."""

import os

os.environ.setdefault("TQDM_DISABLE", "1")
