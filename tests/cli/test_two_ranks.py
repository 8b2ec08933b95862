"""A run from YAML on two ranks that Lightning starts by itself, against one process in plain PyTorch."""

import subprocess
import sys

import pytest
import torch
import yaml

from tests.cli.test_configuration import CONFIG
from tests.integrations.lightning.runs import uneven
from tests.integrations.lightning.toy import joined, plain_update, relative_error

pytestmark = pytest.mark.timeout(390)


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_3"])
def test_the_first_update_is_that_of_one_process(tmp_path, strategy):
    objective = {
        "estimator": {"class_path": "GDPO", "init_args": {"weights": [1.0, 0.5]}},
        "reduction": {"class_path": "TokenMean"},
        "kl": {"coef": 0.1},
    }
    policy = {**CONFIG["model"], "init_args": {"objective": objective, "out": str(tmp_path / "weights.pt")}}
    trainer = {**CONFIG["trainer"], "devices": 2, "strategy": strategy, "default_root_dir": str(tmp_path)}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "model": policy, "trainer": trainer}))
    subprocess.run(
        [sys.executable, "-m", "rlobjectives.cli", "fit", "--config", str(path)],
        check=True,
        timeout=380,
        stdin=subprocess.DEVNULL,
    )
    expected, _ = plain_update(joined([uneven(0, 0), uneven(1, 0)]))
    assert relative_error(torch.load(tmp_path / "weights.pt"), expected) < 1e-6
