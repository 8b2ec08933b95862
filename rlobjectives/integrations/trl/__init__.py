"""TRL: one mixin, every objective.

```python
from trl import GRPOTrainer
from rlobjectives.integrations.trl import ObjectiveMixin

class Trainer(ObjectiveMixin, GRPOTrainer):
    objective = "gdpo"
```
"""

from rlobjectives.integrations.extras import need
from rlobjectives.integrations.trl.versions import UnsupportedVersionError, check_version, installed_version

# Before anything of TRL is imported, so that an unsupported version says so and nothing else.
check_version(installed_version())
need("rlobjectives.integrations.trl", "trl")

from rlobjectives.integrations.trl.config import ObjectiveConfig
from rlobjectives.integrations.trl.mixin import ObjectiveMixin
from rlobjectives.integrations.trl.trainers import ObjectiveGRPOTrainer, ObjectiveRLOOTrainer

__all__ = [
    "ObjectiveConfig",
    "ObjectiveGRPOTrainer",
    "ObjectiveMixin",
    "ObjectiveRLOOTrainer",
    "UnsupportedVersionError",
]
