"""Experts that are used most come to the device at the next start, and no token depends on it."""

import json
import logging
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, save_checkpoint
from expert_models import expert_model, experts_config

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.cache_files import cache_folder
from neo_desktop.engine.profiling.expert_use import ExpertUse

EXPERTS = experts_config().experts
assert EXPERTS is not None


def test_those_used_most_come_first_and_older_uses_count_less_in_the_end(tmp_path: Path) -> None:
    model = expert_model(1)
    assert model.expert_use is not None
    use = ExpertUse(tmp_path, EXPERTS)
    assert (use.order, use.num_choices) == (None, 0)
    assert use.ordered(model.config).experts == EXPERTS
    use.keep(model)  # nothing was chosen
    assert use.order is None
    model.expert_use[:, :6] = torch.tensor([5, 0, 9, 1, 7, 2])
    model.expert_use[:, 6] = 1000  # nobody's
    use.keep(model)
    assert not model.expert_use.any()
    again = ExpertUse(tmp_path, EXPERTS)
    assert again.order == ((2, 4, 0, 5, 3, 1),) * 3
    assert again.num_choices == 3 * 24
    # What is counted next is counted in that order.
    ordered = expert_model(1, order=again.order)
    assert ordered.expert_use is not None
    ordered.expert_use[:, 5] = 2_000_000_000  # of expert 1
    again.keep(ordered)
    last = ExpertUse(tmp_path, EXPERTS)
    assert last.order is not None
    assert last.order[0][0] == 1
    assert last.num_choices <= 3 * 10_000_000
    assert ExpertUse(tmp_path / "another", EXPERTS).order is None


@pytest.mark.parametrize(
    "counts", [None, [1, 2], [[1] * 6] * 4, [[1] * 6, [1] * 6, [1, 2, 3, 4, 5, -6]], "many"]
)
def test_a_damaged_file_counts_as_none(
    counts: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, use = expert_model(1), ExpertUse(tmp_path, EXPERTS)
    assert model.expert_use is not None
    model.expert_use += 1
    before = set(cache_folder("experts").glob("*"))
    use.keep(model)
    (file,) = set(cache_folder("experts").glob("*")) - before
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "counts": counts}))
    assert ExpertUse(tmp_path, EXPERTS).order is None
    assert "counted again" in caplog.text


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_the_next_start_has_them_on_the_device(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_checkpoint(tmp_path, family)
    prompts = [[(7 * i + 3 * length) % VOCAB_SIZE for i in range(length)] for length in (3, 40, 17)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    said, tokens, orders = [], [], []
    for _ in range(2):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO),
            Engine.from_pretrained(folder, device="cpu", gpu_weights_gib=0.0005) as engine,
        ):
            assert engine.config.experts is not None
            orders.append(engine.config.experts.order)
            tokens.append([output.token_ids for output in engine.generate(prompts, params)])
        said.append(caplog.text)
    assert tokens[0] == tokens[1]
    assert "it is not known yet which are used most" in said[0]
    assert "those that were used most, by " in said[1]
    assert orders[0] is None
    assert orders[1] is not None
    assert any(list(order) != sorted(order) for order in orders[1])
