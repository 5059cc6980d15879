"""Records check every field when they are made, in one sentence; JSON is read strictly; hashes and bytes are what they were."""

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import at_most

from mi_route2.adapters import AdapterSpec
from mi_route2.files import parse_json
from mi_route2.routing import EraseSpec, MaskSpec
from mi_route2.validation import AtLeastOne, Positive, read_lines, read_record, replace_fields, validated
from studies.environments.micro.settings import MicroConfig, WarmStartConfig, WorldConfig
from studies.lanes.config import LanesConfig, Loop
from studies.lanes.optim import OptimSettings
from studies.lanes.quantization.gptq import GPTQSettings
from studies.lanes.scoring.ttt import TTTSettings
from studies.lanes.settings import Settings as LanesSettings
from studies.lanes.train import Training
from studies.steering.settings import Settings as SteeringSettings
from studies.tracing.settings import Settings as TracingSettings
from studies.training.arms import ARMS, Arm
from studies.training.settings import CHAT, PRESETS, ChatModel, Settings

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@validated
class Inner:
    rate: Positive = 1.0


@validated
class Outer:
    steps: AtLeastOne = 3
    inner: Inner = dataclasses.field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck: choose 12")
        if self.steps == 14:
            raise KeyError("14 is a key")


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "rank, a word": (lambda: AdapterSpec(rank="4"), "rank must be a whole number of at least 1 or none, not '4'"),  # pyright: ignore
    "rank 0": (lambda: AdapterSpec(rank=0), "rank must be at least 1, not 0"),
    "rank, a truth": (lambda: AdapterSpec(rank=True), "rank must be a whole number of at least 1 or none, not True"),
    "quarantine rank": (lambda: AdapterSpec(quarantine_rank=2.0), "quarantine_rank must be a whole number"),  # pyright: ignore
    "kept": (lambda: AdapterSpec(kept="lroa"), "kept must be one of svd, lora, not 'lroa'"),  # pyright: ignore
    "an unknown field": (lambda: AdapterSpec(ranks=4), "unknown setting 'ranks': did you mean 'rank'? choose from kept, rank"),  # pyright: ignore
    "too many values": (lambda: AdapterSpec("svd", None, "lora", 4, False, 1), "AdapterSpec takes at most 5 values"),  # pyright: ignore
    "tau, a word": (lambda: MaskSpec(tau="0.1"), "tau must be a finite number, not '0.1'"),  # pyright: ignore
    "tau, no number": (lambda: MaskSpec(tau=math.nan), "tau must be a finite number, not nan"),
    "tau, infinite": (lambda: MaskSpec(tau=-math.inf), "tau must be a finite number, not -inf"),
    "score": (lambda: MaskSpec(score="garde"), "score must be one of none, act, grad, full"),  # pyright: ignore
    "negative scale": (lambda: MaskSpec(negative_scale=-0.1), "negative_scale must be at least 0, not -0.1"),
    "refresh": (lambda: MaskSpec(refresh_every=-1), "refresh_every must be at least 0, not -1"),
    "a token flag of a gradient": (lambda: MaskSpec(unit="token"), "a gradient is summed over the tokens"),
    "k": (lambda: EraseSpec(k=0), "k must be at least 1, not 0"),
    "replaced": (lambda: dataclasses.replace(MaskSpec(), tau=math.nan), "tau must be a finite number, not nan"),
    "kl": (lambda: Settings(kl=math.nan), "kl must be a finite number of at least 0, not nan"),
    "kept_lr": (lambda: Settings(kept_lr=math.inf), "kept_lr must be a finite number above 0, not inf"),
    "half a step": (lambda: Settings(steps=50.5), "steps must be a whole number of at least 1, not 50.5"),  # pyright: ignore
    "no betas": (lambda: Settings(betas=()), "betas.0 is missing (and 1 more)"),  # pyright: ignore
    "betas, a list": (lambda: Settings(betas=[0.9, 0.99]), "betas must be a tuple of 2, each entry a finite number"),  # pyright: ignore
    "a beta of 1": (lambda: Settings(betas=(0.9, 1.0)), "betas.1 must be at least 0 and below 1, not 1.0"),
    "adapt, a word": (lambda: Settings(adapt="blocks"), "adapt must be a tuple of one or more texts, not 'blocks'"),  # pyright: ignore
    "adapt, nothing": (lambda: Settings(adapt=()), "adapt must be a tuple of one or more texts, not ()"),
    "a path for a preset": (lambda: Settings(preset="../strong"), "preset must be a word of letters, digits"),
    "a group of one": (lambda: Settings(group=1), "group must be at least 2, not 1"),
    "teachers": (lambda: Settings(teachers=0, teachers_per_group=1), "teachers must be at least 1 if teachers_per_group is"),
    "a chat model": (lambda: ChatModel("p", "w", max_new=0), "max_new must be at least 1, not 0"),
    "warm steps": (lambda: WarmStartConfig(steps=0), "steps must be at least 1, not 0"),
    "a world": (lambda: WorldConfig("w", rho=1.5), "rho must be between 0 and 1, not 1.5"),
    "a micro model": (lambda: MicroConfig(heads=0), "heads must be at least 1, not 0"),
    "an arm": (lambda: dataclasses.replace(ARMS["absorb"], role="hero"), "role must be one of baseline, method, control, bound"),
    "an arm's route": (lambda: Arm("a", "b", "method", None), "route must be of type MaskSpec or of type EraseSpec"),  # pyright: ignore
    "tracing": (lambda: TracingSettings("x", arms=("vanilla", "vanilla")), "arms must be given once each"),
    "tracing, none": (lambda: TracingSettings("x", arms=()), "arms must be a tuple of one or more texts, not ()"),
    "steering": (lambda: SteeringSettings(quantiles=(0.95, 1.0)), "quantiles.1 must be above 0 and below 1, not 1.0"),
    "steering, delays": (lambda: SteeringSettings(delays=(0,)), "delays.0 must be at least 1, not 0"),
    "lanes": (lambda: Training(precision="float16"), "precision must be one of float32, bf16, not 'float16'"),  # pyright: ignore
    "a loop": (lambda: Loop(0, 1, -1), "loops must be at least 0, not -1"),
    "lanes, rates": (lambda: OptimSettings(decay=math.inf), "decay must be a finite number of at least 0, not inf"),
    "lanes, levels": (lambda: GPTQSettings(levels=128), "levels must be between 1 and 127, not 128"),
    "lanes, momentum": (lambda: TTTSettings(momentum=1.0), "momentum must be at least 0 and below 1, not 1.0"),
    "lanes, heads": (lambda: LanesConfig(d_model=10), "d_model 10 must be a multiple of twice the 4 heads"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_value_is_one_sentence(what: str) -> None:
    make, sentence = WRONG[what]
    with pytest.raises(ValueError) as caught:
        make()
    assert sentence in str(caught.value)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)


FILES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "not a number": (lambda raw: raw | {"kl": math.nan}, "holds NaN, which is not a finite number"),
    "half a step": (lambda raw: raw | {"steps": 50.5}, "steps must be a whole number of at least 1, not 50.5"),
    "no betas": (lambda raw: raw | {"betas": []}, "betas.0 is missing"),
    "a word for words": (lambda raw: raw | {"adapt": "blocks"}, "adapt must be a tuple of one or more texts, not 'blocks'"),
    "a path": (lambda raw: raw | {"preset": "../strong"}, "preset must be a word of letters, digits"),
    "an unknown key": (lambda raw: raw | {"kept_rl": 1}, "unknown setting 'kept_rl': did you mean 'kept_lr'?"),
    "an unknown key inside": (
        lambda raw: raw | {"warm": raw["warm"] | {"step": 1}},
        "unknown setting 'step': did you mean 'steps'?",
    ),
    "a list for an object": (lambda raw: raw | {"warm": [1]}, "warm must be of type WarmStartConfig, not [1]"),
    "text for an object": (lambda raw: raw | {"chat": "x"}, "chat must be of type ChatModel or none, not 'x'"),
    "a key too few": (lambda raw: {k: v for k, v in raw.items() if k != "kept_lr"}, "kept_lr is missing"),
    "a key too few inside": (lambda raw: raw | {"warm": {"model": {}}}, "warm.steps is missing"),
    "an unknown world": (lambda raw: raw | {"world": "weka"}, "unknown world 'weka': did you mean 'weak'?"),
    "nothing": (lambda _: {}, "preset is missing"),
    "no object": (lambda _: [], "this is not a JSON object but []"),
    "null": (lambda _: None, "this is not a JSON object but None"),
    "no JSON": (lambda _: "{", "this is not JSON ("),
}


@pytest.mark.parametrize("what", FILES)
def test_a_damaged_settings_file_is_one_sentence_that_names_it(tmp_path: Path, what: str) -> None:
    change, part = FILES[what]
    content = change(PRESETS["strong"].as_dict())
    (tmp_path / "settings.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as caught:
        Settings.read(tmp_path / "settings.json")
    assert part in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'settings.json'} does not hold settings of this study (")
    assert "\n" not in str(caught.value)


def test_published_settings_are_read_back_under_their_published_hash() -> None:
    for preset in ("strong", "weak", "delta_s"):
        settings = Settings.read(RESULTS / preset / "settings.json")
        published = json.loads((RESULTS / preset / "provenance.json").read_text())
        assert settings == PRESETS[preset]
        assert settings.digest == published["settings_hash"]
        assert published["study"] == settings.folder
    tracing = TracingSettings.read(RESULTS / "tracing" / "settings.json")
    assert tracing.training == Settings.read(RESULTS / "tracing" / "training.json").digest
    for study, settings in (("steering", SteeringSettings()), ("lanes", LanesSettings.read(RESULTS / "lanes"))):
        assert settings.digest == json.loads((RESULTS / study / "provenance.json").read_text())["settings_hash"]


def test_what_is_written_is_what_is_read() -> None:
    for settings in (*PRESETS.values(), CHAT, dataclasses.replace(CHAT, chat=ChatModel("p", "w"))):
        text = json.dumps(settings.as_dict())
        again = read_record(Settings, text, optional=("chat",))
        assert (again, json.dumps(again.as_dict())) == (settings, text)


def test_what_fields_are_together_is_said_by_the_record_itself() -> None:
    for steps, kind, sentence in ((13, ValueError, "13 steps bring bad luck"), (14, KeyError, "14 is a key")):
        with pytest.raises(kind, match=sentence):
            Outer(steps)
        with pytest.raises(ValueError, match=sentence):
            read_record(Outer, {"steps": steps, "inner": {"rate": 1.0}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        Outer().steps = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(Outer(4)) == hash(Outer(4))
    with pytest.raises(ValueError, match="inner must be of type Inner, not 3"):
        Outer(inner=3)  # pyright: ignore[reportArgumentType]


def test_words_of_a_command_line_change_records() -> None:
    changed = replace_fields(
        PRESETS["strong"], {"steps": "7", "warm.lr": "1e-2", "kept_rank": "2", "micro": "none", "betas": "0.8,0.9"}
    )
    warm = dataclasses.replace(PRESETS["strong"].warm, lr=1e-2)
    assert changed == dataclasses.replace(PRESETS["strong"], steps=7, warm=warm, kept_rank=2, betas=(0.8, 0.9))
    with pytest.raises(ValueError, match=r"warm.lr must be a finite number above 0, not 'fast'"):
        replace_fields(PRESETS["strong"], {"warm.lr": "fast"})
    for name, word in {"steps": "1_0", "kl": "1_0.0", "kept_rank": "1_0", "betas": "0.8,0_0.9", "warm.steps": "1_0"}.items():
        with pytest.raises(ValueError, match=f"{name}.* must be .*, not '"):
            replace_fields(PRESETS["strong"], {name: word})
    assert replace_fields(PRESETS["strong"], {"adapt": "a_1,b"}).adapt == ("a_1", "b")


def test_minus_zero_is_zero_in_settings() -> None:
    """Their hashes would differ, and the runs would not."""
    strong = PRESETS["strong"]
    assert strong.folder == "strong-88e860b8"
    for kl in ("-0.0", "-0"):
        assert replace_fields(strong, {"kl": kl}).folder == strong.folder
    negative = dataclasses.replace(strong, kl=-0.0, none_fraction=-0.0, betas=(-0.0, 0.9))
    assert negative.folder == dataclasses.replace(strong, none_fraction=0.0, betas=(0.0, 0.9)).folder
    assert read_record(Settings, json.dumps(strong.as_dict() | {"kl": -0.0}), optional=("chat",)).folder == strong.folder


@pytest.mark.matrix
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists)
)
def test_json_is_read_as_python_reads_it(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps({"a": value}, ensure_ascii=True).encode()) == {"a": value}


TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\r\n")), max_size=6
)


@given(TEXTS, st.booleans())
def test_every_text_of_json_lines_comes_back_whole(texts: list[str], ascii_alone: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_bytes("\n".join(json.dumps(text, ensure_ascii=ascii_alone) for text in texts).encode())
        assert read_lines(file, lambda index, row: (index, row)) == list(enumerate(texts))


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf1\r\n\n  \n"a"\n\n')
    assert read_lines(tmp_path / "rows.jsonl", lambda index, row: (index, row)) == [(0, 1), (3, "a")]


REFUSED = [
    (b"{oops", "this is not JSON (Expecting property name enclosed in double quotes, character 2)"),
    (b"\xe9", "this is not UTF-8 (byte 1)"),
    (b"\xef\xbb\xbf1", "this is not JSON (Unexpected UTF-8 BOM (decode using utf-8-sig), character 1)"),
    *((level * 100_000, "this JSON is nested too deeply: use fewer levels") for level in (b"[", b'{"a":')),
    (b'{"a": 1, "b": {"a": 2, "a": 2}}', "this JSON has the key 'a' twice in one object: remove one of them"),
    (b'["\\uD83D\\ude00", "\\ud83d x"]', r"this JSON holds half a character (\ud83d): write the whole pair of escapes"),
    (b'{"\\udead": 1}', r"this JSON holds half a character (\udead): write the whole pair of escapes"),
    (b"[NaN]", "this JSON holds NaN, which is not a finite number: write null for an undefined value"),
    (b"-Infinity", "this JSON holds -Infinity, which is not a finite number: write null for an undefined value"),
    (b"[-1e999]", "this JSON holds -1e999, which is not a finite number: write null for an undefined value"),
    (b"9" * 5000, "Exceeds the limit (4300 digits)"),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_json_that_says_two_things_or_none_is_refused(tmp_path: Path, text: bytes, sentence: str) -> None:
    """Alone, and as a line among others, which is then named or left out."""
    with pytest.raises(ValueError) as alone:
        parse_json(text)
    assert str(alone.value).startswith(sentence)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"1\n" + text + b"\n2\n")
    with pytest.raises(ValueError) as caught:
        read_lines(file, lambda _, row: row)
    assert str(caught.value) == f"{file}, line 2: {alone.value}"
    left_out: list[str] = []
    assert read_lines(file, lambda _, row: row, left_out) == [1, 2]
    assert left_out == [str(caught.value)]


def test_json_of_several_lines_is_refused_by_line_and_column() -> None:
    with pytest.raises(ValueError, match=r"this is not JSON \(Expecting value, line 3, column 2\)"):
        parse_json('{"a": 1,\n"b":\n }')


def test_half_a_character_in_a_text_that_no_file_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"half a character \(\\ud800\)"):
        parse_json('"\ud800"')


def test_an_object_of_many_names_is_read_at_once() -> None:
    names = {f"name {i}": i for i in range(30_000)}
    with at_most(2.0):
        assert parse_json(json.dumps(names)) == names


def test_a_row_that_its_reader_refuses_is_named(tmp_path: Path) -> None:
    def read(_index: int, row: int) -> int:
        if row > 2:
            raise ValueError(f"{row} is too many")
        return row

    (tmp_path / "rows.jsonl").write_text("1\n3\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: 3 is too many"):
        read_lines(tmp_path / "rows.jsonl", read)
