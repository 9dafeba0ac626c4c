"""DeepSpeed's JSON: typing errors, open values, two sources that differ."""

from __future__ import annotations

import copy

import pytest

from echo_deepspeed.config import _Watched, conflicts, refuse_open, unread
from echo_hooks.errors import UsageError
from echo_hooks.patching import PatchSet


def test_a_key_that_deepspeed_does_not_read(capfd):
    """deepspeedai/DeepSpeed#653, #1809."""
    runtime = pytest.importorskip("deepspeed.runtime.config")
    from echo_deepspeed import config

    patches = PatchSet(config.patches(runtime))
    patches.install()
    try:
        values = {"train_batch_size": 8, "gradient_clipp1ng": 1.0, "zero_optimization": {"stage": 1}, "nonsense": 1,
                  "bf16": {"enabled": True}, "steps_per_print": 5, "wall_clock_breakdown": False,
                  "zero_allow_untested_optimizer": True, "comms_logger": {"enabled": False},
                  "tensorboard": {"enabled": False}, "activation_checkpointing": {}, "flops_profiler": {},
                  "optimizer": {"type": "Adam", "params": {}}, "scheduler": {"type": "WarmupLR", "params": {}},
                  "gradient_accumulation_steps": 8, "prescale_gradients": False, "fp16": {"enabled": False},
                  "communication_data_type": "fp32", "dump_state": False}  # fmt: skip
        runtime.DeepSpeedConfig(values)
    finally:
        patches.remove()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ds_config: ")]
    assert said == [
        "ds_config: DeepSpeed does not read 'gradient_clipp1ng', so it has no effect; the nearest one that it reads is "
        "'gradient_clipping'",
        "ds_config: DeepSpeed does not read 'nonsense', so it has no effect",
    ]


def test_what_counts_as_asked():
    config = _Watched({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    _ = config["a"], config.get("b"), "c" in config, "d" in config.keys(), copy.copy(config).pop("e")  # noqa: SIM118
    assert unread(config, config.asked) == []
    assert list(config.keys()) == list("abcde")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": "auto"}, "train_batch_size is 'auto'"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size is 'auto'"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device is 'nvme'"),
    ],
)
def test_open_values(config, said):
    with pytest.raises(UsageError, match=said):
        refuse_open(config)
    refuse_open({"pipeline": {"stages": "auto"}})


def test_accelerate_against_ds_config():
    """huggingface/accelerate#936: accumulation 2 against 10, stage 2 against 3."""
    own = {"gradient_accumulation_steps": 2, "zero_stage": "2", "gradient_clipping": 1.0}
    config = {"gradient_accumulation_steps": 10, "zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
    assert conflicts(own, config) == [
        "accelerate has gradient_accumulation_steps 2, the ds_config has gradient_accumulation_steps 10: the "
        "ds_config's is used",
        "accelerate has zero_stage 2, the ds_config has zero_optimization.stage 3: the ds_config's is used",
    ]
    assert conflicts({"zero_stage": 3}, config) == []
