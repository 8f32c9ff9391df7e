"""The recipe translate: data, tokenizers, order, training, and errors."""

import os
import re
import signal
import struct
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import run
from support.runs import ask, check, digest, read_rows, samestep_command
from support.selection import one_in
from support.waiting import DEADLINE_S
from torch.optim.lr_scheduler import SequentialLR

import samestep
from samestep.recipes import translate
from samestep.recipes.corpora import sentence_pairs
from samestep.recipes.corpora.encoded_pairs import SPECIAL, Bucketed, Pairs, collate, divide, encode_all, load_data
from samestep.recipes.corpora.sentence_pairs import read_catalogue, read_pairs
from samestep.recipes.corpora.text_tokenizer import train_bpe
from samestep.snapshot.store import Store

MODELS = Path(translate.__file__).parent / "models"
NOUNS = {"cat": "gatto", "dog": "cane", "book": "libro", "train": "treno", "friend": "amico"}
ADJECTIVES = {"red": "rosso", "small": "piccolo", "old": "vecchio", "": ""}
VERBS = {"sees": "vede", "has": "ha", "wants": "vuole"}


def build_pairs(num: int) -> list[tuple[str, str]]:
    """English sentences and their Italian translations."""
    words = list(product(NOUNS.items(), ADJECTIVES.items(), VERBS.items(), NOUNS.items()))
    chosen = np.random.default_rng(0).permutation(len(words))[:num]
    pairs = []
    for (noun, nome), (adjective, aggettivo), (verb, verbo), (what, cosa) in (words[k] for k in chosen):
        english, italian = f"the {adjective} {noun} {verb} a {what}", f"il {nome} {aggettivo} {verbo} un {cosa}"
        pairs.append((" ".join(english.split()), " ".join(italian.split())))
    return pairs


def write_pairs(file: Path, pairs: list[tuple[str, str]]) -> Path:
    file.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return file


def write_catalogue(
    file: Path, messages: Mapping[str, str], *, charset: str = "UTF-8", order: str = "<", magic: int = 0x950412DE
) -> None:
    """Write a .mo file, as msgfmt does."""
    header = f"Project-Id-Version: x\nContent-Type: text/plain; charset={charset}\n"
    header += "Plural-Forms: nplurals=2; plural=(n != 1);\n"
    rows = sorted((key.encode(charset), text.encode(charset)) for key, text in {"": header, **messages}.items())
    content, tables = b"", [b"", b""]
    for column in (0, 1):
        for row in rows:
            tables[column] += struct.pack(f"{order}2I", len(row[column]), 28 + 16 * len(rows) + len(content))
            content += row[column] + b"\0"
    head = struct.pack(f"{order}7I", magic, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head + tables[0] + tables[1] + content)


def read_texts(*arguments: Any) -> list[tuple[str, str]]:
    return read_pairs(*map(str, arguments))


# --- catalogues and files -------------------------------------------------------------------------------------------


def test_catalogues_are_read_as_gettext_reads_them(tmp_path: Path) -> None:
    messages = {
        "open the file": "öffne die Datei",
        "menu\4close the file": "schließe die Datei",
        "delete one file\0delete %d files": "lösche eine Datei\0lösche %d Dateien",
        "untranslated words here": "untranslated words here",
        "not translated yet": "",
        "short": "kurz",
        "two\n  lines of\ttext": "zwei\nZeilen Text",
    }
    for number, (charset, order) in enumerate((("UTF-8", "<"), ("ISO-8859-1", ">"))):
        root = tmp_path / f"{number}"
        write_catalogue(root / "locale/de/LC_MESSAGES/tool.mo", messages, charset=charset, order=order)
        assert sorted(read_texts(root, "en", "de")) == [
            ("close the file", "schließe die Datei"),
            ("delete one file", "lösche eine Datei"),
            ("open the file", "öffne die Datei"),
            ("two lines of text", "zwei Zeilen Text"),
        ]
        assert sorted(read_texts(root, "de", "en"))[0] == ("lösche eine Datei", "delete one file")


def test_two_languages_meet_in_the_keys_of_one_catalogue(tmp_path: Path) -> None:
    keys = ["open the file", "close the file", "read the file"]
    write_catalogue(tmp_path / "de/LC_MESSAGES/a.mo", {key: f"{key} auf deutsch" for key in keys})
    write_catalogue(tmp_path / "fr/LC_MESSAGES/a.mo", {key: f"{key} en français" for key in keys[:2]})
    write_catalogue(tmp_path / "fr/LC_MESSAGES/b.mo", {keys[2]: "ailleurs en français"})
    expected = [(f"{key} auf deutsch", f"{key} en français") for key in keys[:2]]
    assert sorted(read_texts(tmp_path, "de", "fr")) == sorted(expected)


def test_the_catalogues_of_the_system_and_of_packages_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalogue(tmp_path / "share/locale/de/LC_MESSAGES/a.mo", {"of the system": "vom System her"})
    packages = tmp_path / "lib/site-packages"
    write_catalogue(packages / "web/conf/locale/de/LC_MESSAGES/b.mo", {"of a package": "von einem Paket"})
    (packages / "web/conf/locale/de/LC_MESSAGES/c.mo").write_bytes(b"no catalogue")  # the user cannot repair it
    monkeypatch.setattr(sentence_pairs, "SYSTEM", ())
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(packages)])
    assert [source for source, _ in read_pairs("gettext", "en", "de")] == ["of the system", "of a package"]
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(samestep.Error, match=r"gettext holds no pair of en and de .* `pip install django`$"):
        read_pairs("gettext", "en", "de")


@pytest.mark.parametrize("fault", ["magic", "cut", "charset", "bytes"])
def test_a_damaged_catalogue_is_named(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "de/LC_MESSAGES/tool.mo"
    write_catalogue(file, {"one two three": "eins zwei drei ä"}, magic=7 if fault == "magic" else 0x950412DE)
    content = file.read_bytes()
    if fault == "cut":
        file.write_bytes(content[:-20])
    elif fault == "charset":
        file.write_bytes(content.replace(b"UTF-8", b"UTF-X"))
    elif fault == "bytes":
        file.write_bytes(content.replace("ä".encode(), b"\xff\xff"))
    with pytest.raises((OSError, ValueError, LookupError)):
        read_catalogue(file)
    with pytest.raises(samestep.Error, match=f"{tmp_path} holds no pair of en and de that can be used"):
        read_texts(tmp_path, "en", "de")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "is no source, a tab and a target"),
        ("alone\t ", "is no source, a tab and a target"),
        ("a\tb\tc", "is no source, a tab and a target"),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_bytes(b"\xef\xbb\xbfyes \tja\r\nno\tnein\n")
    assert read_texts(file, "en", "de") == [("yes", "ja"), ("no", "nein")]
    file.write_bytes(file.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(samestep.Error, match=f"{file}, line 3 {what}: correct or remove it"):
        read_texts(file, "en", "de")


def test_missing_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    (tmp_path / "latin1.tsv").write_bytes(b"a\xff\tb")
    for data, what in (
        (tmp_path / "empty.tsv", "holds no pair of en and de"),
        (tmp_path / "none.tsv", "none.tsv is no text in UTF-8 .*No such file"),
        (tmp_path / "latin1.tsv", "latin1.tsv is no text in UTF-8 .*invalid start byte"),
        (tmp_path, "holds no pair of en and de"),
    ):
        with pytest.raises(samestep.Error, match=what):
            read_texts(data, "en", "de")


# --- tokenizers, parts and batches ----------------------------------------------------------------------------------


def test_tokenizers_keep_every_text() -> None:
    tokenizer = train_bpe(["good morning", "good night"] * 3, 300, SPECIAL, adds_space=True, min_frequency=0)
    texts = ["good morning", "größer 漢字 🙂", "[END] of [PAD]", "a\0b", "a  b"]
    rows = encode_all(tokenizer, texts)
    assert [text.strip() for text in tokenizer.decode_batch(rows)] == texts
    assert all(token > 2 for row in rows for token in row)  # also for texts that look like PAD, START and END
    assert len(rows[0]) < len("good morning") / 2


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(samestep.Error, match=r"needs sacrebleu .*: pip install 'samestep\[translate\]'$"):
        translate.build_metrics("de")


def test_no_source_is_both_trained_on_and_held_out() -> None:
    pairs = [(f"Sentence {k // 2}".upper() if k % 2 else f"Sentence {k // 2}", f"Satz {k}") for k in range(80)]
    train, held_out = divide(pairs, 10)
    assert sorted(train + held_out) == sorted(pairs)
    assert len({source.casefold() for source, _ in held_out}) == 10
    assert not {source.casefold() for source, _ in held_out} & {source.casefold() for source, _ in train}
    assert divide(pairs[::-1], 10)[1] == held_out[::-1]  # in whatever order the data are read
    assert len(divide(pairs, None)[1]) == 8
    assert divide(pairs, 0) == (pairs, pairs)
    with pytest.raises(samestep.Error, match="40 held-out sources of 40 leave no pair to train on: add pairs"):
        divide(pairs, 40)


def test_a_pair_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    pairs = build_pairs(20)
    pairs[6] = (pairs[6][0], " ".join(map(str, range(90))))
    file = write_pairs(tmp_path / "pairs.tsv", pairs)
    sizes = {"num_held_out": 0, "vocab_size": 300}
    data = load_data(str(file), "en", "it", tmp_path / "tokenizers", **sizes, max_length=60)
    assert (len(data.train), len(data.held_out), data.num_left_out) == (19, 19, 1)
    with pytest.raises(samestep.Error, match="too few pairs have at most 2 tokens"):
        load_data(str(file), "en", "it", tmp_path / "tokenizers", **sizes, max_length=2)


def test_batches_hold_the_sentences_with_padding() -> None:
    pairs = Pairs([[5, 6], [7], []], [[8], [9, 10, 11], []])
    batch = collate([pairs[1], pairs[0]])
    assert batch["source"].tolist() == [[7, 2, 0], [5, 6, 2]]
    assert batch["target"].tolist() == [[1, 9, 10, 11], [1, 8, 2, 0]]
    assert batch["labels"].tolist() == [[9, 10, 11, 2], [8, 2, 0, 0]]
    assert batch["num_tokens"] == 6
    assert batch["source"].dtype == torch.int64


def test_batches_are_of_similar_lengths_in_an_order_of_epoch_and_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, (2, 1003))
    pairs = Pairs(*([[3] * n for n in row] for row in lengths))
    order = Bucketed(pairs, 10, seed=1)
    first = order(0)
    assert sorted(first.tolist()) == list(range(1003))
    np.testing.assert_array_equal(first, Bucketed(pairs, 10, seed=1)(0))
    for other in (order(1), Bucketed(pairs, 10, seed=2)(0)):
        assert not np.array_equal(first, other)
    batches = [lengths[:, first[start : start + 10]] for start in range(0, 1000, 10)]
    assert np.mean([np.ptp(batch[0]) for batch in batches]) < 1
    assert np.mean([np.ptp(batch[1]) for batch in batches]) < 15  # of 28
    means = [batch[0].mean() for batch in batches]
    assert abs(np.corrcoef(means, range(100))[0, 1]) < 0.3  # the short ones are not first
    np.testing.assert_array_equal(sorted(Bucketed(Pairs([[3]] * 3, [[3]] * 3), 10, 0)(5)), [0, 1, 2])


def test_the_width_must_fit_the_heads() -> None:
    with pytest.raises(samestep.Error, match="--dim is 20, which is no multiple of twice 4 --heads"):
        translate.main(["--dim", "20", "--heads", "4"])


# --- training -------------------------------------------------------------------------------------------------------

OPTIONS = """
--source=en --target=it --held-out=0 --vocab-size=300 --max-length=40 --dim=64 --heads=2 --layers=1 --dropout=0
--label-smoothing=0.05 --batch-size=12 --lr=1e-2 --warm-up=8 --epochs=24 --validate-every=12 --ema=0.7
"""
TINY = OPTIONS.split()


def train(arguments: list[str], kill_at: int | None = None) -> None:
    """Train on a rank. `kill_at`: kill rank 1 when it updates the learning rate for this step."""
    if kill_at is not None:
        step = SequentialLR.step

        def step_or_die(schedule: SequentialLR) -> None:
            step(schedule)
            if schedule.last_epoch == kill_at and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

        SequentialLR.step = step_or_die
    translate.main(arguments)


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.tsv", build_pairs(20))


@pytest.fixture(scope="module")
def trained(pairs_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on one rank, and its output."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    arguments = [
        "train",
        "translate",
        f"--data={pairs_file}",
        f"--run-dir={run_dir}",
        "--snapshot-every=10epochs",
        *TINY,
    ]
    return run_dir, check(samestep_command(*arguments, cwd=run_dir.parent)).stdout


def test_it_learns_twenty_pairs_by_heart(trained: tuple[Path, str]) -> None:
    run_dir, printed = trained
    scores = [row for row in read_rows(run_dir) if "validation/BLEU" in row]
    assert len(scores) == 2
    assert scores[-1]["validation/BLEU"] > 90
    assert scores[-1]["validation/chrF"] > 90
    assert scores[-1]["validation/loss"] < scores[0]["validation/loss"]
    assert "20 pairs to train on, 20 to score" in printed
    assert len(re.findall(r"^  wanted: il .*\n  found:  ", printed, re.MULTILINE)) == 6
    best = Store(run_dir).find("best", warn=pytest.fail)
    assert best is not None
    assert Store(run_dir).read(best)["state"]["best"] == max(row["validation/BLEU"] for row in scores)


# Two starts of a recipe, on three ranks and on two: 37 s, and 44 s on a busy machine.
@pytest.mark.parametrize(("before", "after"), one_in(3, [("fsdp2", "optimizer"), ("none", "fsdp2"), ("none", "none")]))
def test_it_is_the_same_after_a_kill_of_one_of_three_ranks_and_a_resume_on_two(
    trained: tuple[Path, str], pairs_file: Path, tmp_path: Path, before: str, after: str
) -> None:
    expected, _ = trained
    run_dir = tmp_path / "run"
    arguments = [f"--data={pairs_file}", f"--run-dir={run_dir}", *TINY]
    with pytest.raises(RuntimeError, match="SIGKILL"):
        samestep.spawn(train, 3, (arguments, 11), env={"SAMESTEP_SNAPSHOT_EVERY": "3", "SAMESTEP_SHARD": before})
    assert Store(run_dir).snapshots()
    env = {"SAMESTEP_SNAPSHOT_EVERY": "10epochs", "SAMESTEP_SHARD": after}
    samestep.spawn(train, 2, ([*arguments, "--num-workers=1"],), env=env)
    assert digest(run_dir) == digest(expected)
    assert digest(run_dir, "best") == digest(expected, "best")
    for name in ("metrics.jsonl", "ledger.bin"):
        assert (run_dir / name).read_bytes() == (expected / name).read_bytes()


def test_it_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pair.tsv", build_pairs(1))
    still = ["--lr=0", "--epochs=9", "--validate-every=1", "--patience=1"]
    done = check(samestep_command("train", "translate", f"--data={file}", "--run-dir=run", *TINY, *still, cwd=tmp_path))
    assert "1 validations in a row were not better" in done.stdout + done.stderr
    assert len([row for row in read_rows(tmp_path / "run") if "validation/BLEU" in row]) == 2
    assert done.stdout.count("  wanted: ") == 2, "one pair is shown once in each validation"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_it_learns_two_hundred_pairs_by_heart(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "pairs.tsv", build_pairs(200))
    larger = ["--dim=64", "--layers=2", "--epochs=60", "--validate-every=10", "--batch-size=40", "--lr=5e-3", "--ema=0"]
    arguments = ["train", "translate", f"--data={file}", "--run-dir=run", *TINY, *larger, "--nproc-per-node=2"]
    check(samestep_command(*arguments, cwd=tmp_path, timeout=600))
    scores = [row["validation/BLEU"] for row in read_rows(tmp_path / "run") if "validation/BLEU" in row]
    assert scores[-1] > 90


@pytest.mark.soak
def test_it_runs_under_torchrun(trained: tuple[Path, str], pairs_file: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    command = [*torchrun, "samestep.recipes.translate", f"--data={pairs_file}", "--run-dir=run", *TINY]
    done = run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "run") == digest(trained[0])


# --- the weights elsewhere -------------------------------------------------------------------------


PREDICT = """\
import sys
sys.modules["samestep"] = None  # no import of it works from here on
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from seq2seq import END, Seq2Seq

source, target = (Tokenizer.from_file(f"{sys.argv[1]}/tokenizers/{name}.json") for name in ("source", "target"))
sizes = source.get_vocab_size(), target.get_vocab_size()
model = Seq2Seq(*sizes, dim=64, num_heads=2, num_layers=1, max_length=40).eval()
model.load_state_dict(load_file("model.safetensors"))
for line in sys.stdin:
    tokens = torch.tensor([[*source.encode(line.strip()).ids, END]])
    print(target.decode(model.translate(tokens)[0]).strip())
"""


def test_the_exported_model_translates_without_samestep(trained: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = trained
    ask("export", run_dir, tmp_path / "model.safetensors", "--snapshot", "best", "--object", "ema")
    (tmp_path / "seq2seq.py").write_text((MODELS / "seq2seq.py").read_text())
    (tmp_path / "predict.py").write_text(PREDICT)
    lines = "".join(f"{source}\n" for source, _ in build_pairs(6))
    done = run(
        [sys.executable, str(tmp_path / "predict.py"), str(run_dir)],
        cwd=tmp_path,
        input=lines,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    right = sum(a == b for a, (_, b) in zip(done.stdout.splitlines(), build_pairs(6), strict=True))
    assert right >= 4
