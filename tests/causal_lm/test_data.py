"""PromptDataModule: order, shards, resuming, and errors that say what to do."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from rlobjectives import CapabilityError, MissingColumnError
from rlobjectives.causal_lm import PromptDataModule

ROWS = [{"prompt": f"p{number}", "answer": number} for number in range(10)]


def rows_from_code(count: int, column: str = "prompt") -> list[dict[str, object]]:
    return [{column: f"q{number}"} for number in range(count)]


def on_rank(data: PromptDataModule, rank: int, ranks: int) -> PromptDataModule:
    place = {"num_replicas": ranks, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=place, training=True)
    return data


def names(batches) -> list[list[str]]:
    return [batch.prompts for batch in batches]


def test_an_epoch_is_a_permutation_and_the_next_one_another():
    data = PromptDataModule(ROWS, prompts_per_step=5, seed=0)
    loader = data.train_dataloader()
    first = names(loader)
    data.consumed = 2
    second = names(loader)
    everything = sorted(row["prompt"] for row in ROWS)
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == everything
    assert first != second
    assert len(loader) == 2


def test_resuming_continues_with_the_very_next_batch_also_inside_an_epoch():
    def steps(data: PromptDataModule, count: int) -> list[list[str]]:
        taken = []
        while len(taken) < count:
            for batch in data.train_dataloader():
                data.on_before_batch_transfer(batch, 0)
                taken.append(batch.prompts)
                if len(taken) == count:
                    break
        return taken

    whole = steps(on_rank(PromptDataModule(ROWS, prompts_per_step=3, seed=5), 0, 1), 8)
    first = on_rank(PromptDataModule(ROWS, prompts_per_step=3, seed=5), 0, 1)
    before = steps(first, 4)  # one step into the second epoch
    second = on_rank(PromptDataModule(ROWS, prompts_per_step=3), 0, 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + steps(second, 4) == whole


def test_a_batch_read_ahead_is_not_counted_as_consumed():
    data = on_rank(PromptDataModule(ROWS, prompts_per_step=2, seed=0), 0, 1)
    batches = list(data.train_dataloader())
    data.on_before_batch_transfer(batches[1], 0)
    assert data.state_dict()["consumed"] == 2


def test_ranks_share_out_the_same_prompts_and_keep_groups_whole():
    alone = list(PromptDataModule(ROWS, prompts_per_step=4, num_generations=3, seed=0).train_dataloader())
    shares = [
        list(
            on_rank(
                PromptDataModule(ROWS, prompts_per_step=4, num_generations=3, seed=0), rank, 2
            ).train_dataloader()
        )
        for rank in range(2)
    ]
    for whole, left, right in zip(alone, *shares, strict=True):
        assert left.prompts + right.prompts == whole.prompts
        assert left.ids + right.ids == whole.ids == [0, 1, 2, 3]
        assert left.num_generations == 3


def test_validation_covers_every_prompt_once_in_equally_many_batches():
    loaders = [
        on_rank(
            PromptDataModule(ROWS, prompts_per_step=2, val_dataset=ROWS[:7], val_batch_size=2), rank, 2
        ).val_dataloader()
        for rank in range(2)
    ]
    assert [len(loader) for loader in loaders] == [2, 2]
    counted = [
        prompt
        for loader in loaders
        for batch in loader
        for prompt, flag in zip(batch.prompts, batch.counted, strict=True)
        if flag
    ]
    assert sorted(counted) == [row["prompt"] for row in ROWS[:7]]


def test_prompts_from_files_functions_and_datasets(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    assert PromptDataModule(str(path), prompts_per_step=1).rows("train") == ROWS
    dotted = f"{__name__}.rows_from_code"
    data = PromptDataModule(dotted, prompts_per_step=1, dataset_options={"count": 3})
    assert [row["prompt"] for row in data.rows("train")] == ["q0", "q1", "q2"]
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert PromptDataModule(str(tmp_path / "saved"), prompts_per_step=1).rows("train") == ROWS


def test_errors_say_where_and_what_to_do(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')

    def file(name, content):
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    ragged = [{"prompt": "a", "answer": 1}, {"prompt": "b"}]
    cases = [
        (rows_from_code(2, "question"), MissingColumnError, "no column 'prompt'. It has: question"),
        (ragged, MissingColumnError, "row 1 lacks answer, which row 0 has"),
        (ragged[::-1], MissingColumnError, "row 1 has answer, which row 0 lacks"),
        ([], CapabilityError, "has no rows"),
        (["text"], CapabilityError, "row 0 is a str"),
        (str(broken), CapabilityError, "line 2 is not JSON"),
        (file("broken.json", b'[{"prompt"'), CapabilityError, "broken.json' is not JSON"),
        (file("latin.jsonl", b'{"prompt": "\xe9"}'), CapabilityError, "latin.jsonl' is not UTF-8"),
        (str(tmp_path / "absent.jsonl"), FileNotFoundError, "is not a file"),
        ("json.nothing_there", CapabilityError, "has no 'nothing_there'"),
    ]
    for source, error, words in cases:
        with pytest.raises(error) as caught:
            PromptDataModule(source, prompts_per_step=1).rows("train")
        assert words in str(caught.value)


def test_a_step_that_cannot_be_shared_out_is_refused():
    data = on_rank(PromptDataModule(ROWS, prompts_per_step=3), 0, 2)
    with pytest.raises(CapabilityError, match="expected a multiple of 2"):
        data.setup("fit")
    with pytest.raises(CapabilityError, match="prompts_per_step is 11"):
        PromptDataModule(ROWS, prompts_per_step=11).setup("fit")
    with pytest.raises(CapabilityError, match="num_generations is 0"):
        PromptDataModule(ROWS, prompts_per_step=1, num_generations=0)
    state = PromptDataModule(ROWS, prompts_per_step=1).state_dict()
    with pytest.raises(CapabilityError, match="made with training prompts: 10 \\(now 5\\)"):
        PromptDataModule(ROWS[:5], prompts_per_step=1).load_state_dict(state)


def test_a_json_line_ends_at_a_newline_and_nowhere_else(tmp_path):
    rows = [{"prompt": "a\u2028b\u0085c\x0bd"}, {"prompt": "e"}]
    for name, ending, mark in (("unix.jsonl", "\n", ""), ("windows.jsonl", "\r\n", "\ufeff")):
        text = mark + ending.join(json.dumps(row, ensure_ascii=False) for row in rows)
        (tmp_path / name).write_bytes(text.encode())
        assert PromptDataModule(str(tmp_path / name), prompts_per_step=1).rows("train") == rows


CHANGES = [
    ({"prompts_per_step": 5}, "prompts_per_step 2 (now 5)"),
    ({"shuffle": False}, "shuffle True (now False)"),
    ({"seed": 6}, "seed 5 (now 6)"),
    ({"prompt_column": "other"}, "prompt_column prompt (now other)"),
    ({"dataset": ROWS[::-1]}, "rows of fingerprint"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_a_count_of_steps_is_not_carried_over_to_another_order(change, words):
    rows = [{**row, "other": "x"} for row in ROWS]
    given = {"dataset": rows, "prompts_per_step": 2, "seed": 5}
    first = on_rank(PromptDataModule(**given), 0, 1)
    first.consumed = 3
    for part in (first, first.train_dataloader()):
        other = PromptDataModule(**given | change)
        state = json.loads(json.dumps(part.state_dict()))
        for target in (other, other.train_dataloader()):
            with pytest.raises(CapabilityError) as caught:
                target.load_state_dict(state)
            assert words in str(caught.value)
            assert other.consumed == 0
    same = PromptDataModule(**given | {"num_generations": 4, "seed": None})
    same.train_dataloader().load_state_dict(first.state_dict())
    assert (same.consumed, same.seed) == (3, 5)


def test_rows_without_a_json_form_have_a_fingerprint_that_outlives_the_process():
    rows = [{"prompt": "a", "image": object(), 3: {(1, 2): {"x"}}}]
    states = [
        PromptDataModule(rows, prompts_per_step=1).state_dict()
        for rows in (rows, [{**rows[0], "image": object()}])
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": " "}, "dataset is empty"),
        ({"val_dataset": ""}, "val_dataset is empty"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(CapabilityError, match=words):
        PromptDataModule(**{"dataset": ROWS, "prompts_per_step": 1} | options)
