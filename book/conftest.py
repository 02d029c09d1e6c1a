"""For nbval: what appears on some machines only must not become an output that is compared."""

import os

import matplotlib.font_manager  # noqa: F401 - where its cache is missing, the first import says that it builds one

# Progress bars: they show where a call takes longer than two seconds.
os.environ.setdefault("TQDM_DISABLE", "1")
