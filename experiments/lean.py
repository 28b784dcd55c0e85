"""Starting in half the time: what Lightning need not bring along."""

from __future__ import annotations

import sys

# Optional parts of torchmetrics: measures of texts (transformers, and with it scikit-learn and pandas), of sounds and
# images (scipy, torchvision, torchaudio), and plots (matplotlib). Nothing here uses them.
UNUSED = {"transformers", "scipy", "matplotlib", "torchvision", "torchaudio"}


def import_torchmetrics() -> None:
    """Import torchmetrics, which Lightning imports with everything it can find, as if ``UNUSED`` were not installed.

    To be called before the first import of Lightning; afterwards it does nothing. It spares half of the processor time
    (6 s) that the import takes, at every start of a stage. The packages themselves remain importable.
    """
    if "torchmetrics" in sys.modules:
        return
    from lightning_utilities.core import imports
    from packaging.requirements import Requirement

    cache = imports.RequirementCache
    check, available = cache._check_available, imports.package_available

    def check_or_deny(self: imports.RequirementCache) -> None:
        if self.requirement and Requirement(self.requirement).name in UNUSED:
            self.available, self.message = False, f"{self.requirement}: left out by {__name__}"
        else:
            check(self)

    cache._check_available = check_or_deny
    imports.package_available = lambda name: name not in UNUSED and available(name)
    try:
        import torchmetrics  # noqa: F401
    finally:
        cache._check_available, imports.package_available = check, available
