"""The example that trains: its gradients by finite differences, its losses, its command line."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cufa import device

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from gpt_model import ATTENTIONS, GPT, Config  # noqa: E402
from train_gpt import AdamW, evaluate, sample, schedule, split, train, windows  # noqa: E402

WORDS = ["query", "key", "value", "softmax", "tile", "warp", "block", "row"]
TINY = ["--length", "16", "--batch", "4", "--layers", "1", "--heads", "2", "--width", "16", "--sample", "40"]


def model_of(rng, heads=2, kv_heads=2, width=16, layers=2, length=12, vocabulary=11, **options):
    config = Config(vocabulary, length, layers, heads, kv_heads, width, **options)
    return GPT(config, np, rng)


def text_of(rng, words=2000):
    return " ".join(rng.choice(WORDS, words))


def encoded(text):
    vocabulary = sorted(set(text))
    return np.searchsorted(vocabulary, list(text)), len(vocabulary)


def losses_of(steps=30, batch=6, **options):
    rng = np.random.default_rng(5)
    characters, vocabulary = encoded(text_of(rng))
    model = model_of(rng, vocabulary=vocabulary, length=24, width=32, heads=4, kv_heads=2, **options)
    losses = train(model, characters, rng, steps, batch, learning_rate=1e-2)
    return np.array([float(loss) for loss in losses])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
def test_gradient_of_every_parameter_is_that_of_finite_differences(attention, heads, kv_heads):
    rng = np.random.default_rng(heads + kv_heads)
    model = model_of(rng, heads, kv_heads, attention=attention, attention_dtype="float64", dtype="float64")
    # Larger values than a model starts with: attention that is far from uniform, GELUs that bend.
    model.values[...] = rng.normal(0, 0.5, model.values.size)
    tokens, targets = rng.integers(0, model.config.vocabulary, (2, 3, model.config.length - 1))
    model.gradient[...] = np.nan
    loss = model.loss_and_gradient(tokens, targets)
    assert loss == pytest.approx(model.loss(tokens, targets), rel=1e-12)

    step = 1e-5
    for name, values in model.parameters.items():
        original, direction = values.copy(), rng.standard_normal(values.shape)
        values[...] = original + step * direction
        above = model.loss(tokens, targets)
        values[...] = original - step * direction
        below = model.loss(tokens, targets)
        values[...] = original
        expected = (above - below) / (2 * step)
        assert (model.gradients[name] * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-9), name


def test_positions_past_a_short_sequence_have_no_gradient():
    rng = np.random.default_rng(1)
    model = model_of(rng)
    tokens = rng.integers(0, model.config.vocabulary, (2, 6))
    model.loss_and_gradient(tokens[:, :-1], tokens[:, 1:])
    assert (model.gradients["positions"][5:] == 0).all()
    assert (model.gradients["positions"][:5] != 0).all()


def test_logits_do_not_depend_on_what_comes_later():
    rng = np.random.default_rng(2)
    model = model_of(rng)
    tokens = rng.integers(0, model.config.vocabulary, (1, 12))
    changed = tokens.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % model.config.vocabulary
    before, after = model.logits(tokens), model.logits(changed)
    np.testing.assert_allclose(before[:, :7], after[:, :7], rtol=1e-5, atol=1e-7)
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_an_untrained_model_guesses_evenly():
    rng = np.random.default_rng(3)
    model = model_of(rng, vocabulary=50)
    tokens = rng.integers(0, 50, (4, 13))
    assert model.loss(tokens[:, :-1], tokens[:, 1:]) == pytest.approx(math.log(50), abs=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_loss_falls_to_a_third_in_sixty_steps(dtype):
    losses = losses_of(steps=60, attention_dtype=dtype)
    assert losses[0] == pytest.approx(math.log(len(set("".join(WORDS)) | {" "})), abs=0.1)
    assert losses[-5:].mean() < losses[0] / 3


@pytest.mark.parametrize(
    ("dtype", "attention_dtype", "tolerance"),
    [
        ("float64", "float64", 1e-12),
        ("float32", "float32", 1e-5),
        ("float32", "float16", 3e-4),
        ("float32", "bfloat16", 3e-3),
    ],
)
def test_cufa_and_standard_attention_give_the_same_losses(dtype, attention_dtype, tolerance):
    ours, standard = (
        losses_of(attention=attention, attention_dtype=attention_dtype, dtype=dtype)
        for attention in ("cufa", "standard")
    )
    np.testing.assert_allclose(ours, standard, rtol=tolerance)


def test_standard_attention_does_without_cufa(monkeypatch):
    monkeypatch.delattr("cufa.attention")
    tokens = np.zeros((1, 3), int)
    model_of(np.random.default_rng(0), attention="standard").logits(tokens)
    with pytest.raises(AttributeError):
        model_of(np.random.default_rng(0), attention="cufa").logits(tokens)


def test_the_same_seed_gives_the_same_losses():
    np.testing.assert_array_equal(losses_of(steps=5), losses_of(steps=5))


def test_adamw_steps_by_the_learning_rate_against_the_gradient_and_decays_matrices_only():
    rng = np.random.default_rng(4)
    model = model_of(rng)
    model.values[...] = 1
    model.gradient[...] = rng.choice([-3.0, 3.0], model.gradient.size)
    AdamW(model).step(learning_rate=0.01)
    assert math.sqrt((model.gradient**2).sum()) == pytest.approx(1, rel=1e-4)
    for name, values in model.parameters.items():
        expected = 1 - 0.01 * np.sign(model.gradients[name])
        if values.ndim > 1:
            expected -= 0.01 * 0.1
        np.testing.assert_allclose(values, expected, atol=1e-5, err_msg=name)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [schedule(step, 100, 2.0) for step in range(100)]
    peak = int(np.argmax(rates))
    assert rates[0] < rates[peak] == 2.0
    assert np.all(np.diff(rates[: peak + 1]) > 0)
    assert np.all(np.diff(rates[peak + 1 :]) < 0)
    assert rates[-1] == pytest.approx(0.2, rel=0.01)
    assert schedule(0, 1, 2.0) == 2.0


def test_windows_pair_every_token_with_the_next():
    rng = np.random.default_rng(6)
    model = model_of(rng, length=5)
    characters = rng.integers(0, 11, 40)
    tokens, targets = windows(model, characters, np.array([0, 34]))
    np.testing.assert_array_equal(tokens, [characters[0:5], characters[34:39]])
    np.testing.assert_array_equal(targets, [characters[1:6], characters[35:40]])


def test_evaluation_does_not_depend_on_the_batch():
    rng = np.random.default_rng(7)
    model = model_of(rng)
    characters = rng.integers(0, 11, 100)
    assert evaluate(model, characters, 5) == pytest.approx(evaluate(model, characters, 32), rel=1e-5)


def test_sampling_at_temperature_zero_takes_the_likeliest_and_goes_past_the_length():
    rng = np.random.default_rng(8)
    model = model_of(rng, length=6)
    model.values[...] = rng.normal(0, 0.5, model.values.size)
    tokens = [3, *sample(model, [3], 20, 0, rng)]
    assert len(tokens) == 21
    for end in range(1, 21):
        logits = model.logits(np.array([tokens[max(0, end - 6) : end]]))[0, -1]
        assert tokens[end] == logits.argmax()


def test_sampling_draws_from_the_softmax_at_the_temperature():
    rng = np.random.default_rng(9)
    model = model_of(rng, length=1, vocabulary=3)
    model.values[...] = rng.normal(0, 0.5, model.values.size)
    weights = np.exp(model.logits(np.array([[0]]))[0, -1] / 2.0)
    draws = np.bincount([sample(model, [0], 1, 2.0, rng)[0] for _ in range(1000)], minlength=3) / 1000
    np.testing.assert_allclose(draws, weights / weights.sum(), atol=0.06)


def test_held_out_text_is_the_end_and_apart():
    trained, held_out = split(np.arange(1000), 20)
    np.testing.assert_array_equal(np.concatenate((trained, held_out)), np.arange(1000))
    assert len(held_out) == 100


def test_a_text_of_the_least_length_trains_and_a_shorter_one_is_refused():
    model = model_of(np.random.default_rng(10), length=20)
    for part in split(np.zeros(42, int), 20):
        assert math.isfinite(evaluate(model, part, 4))
    with pytest.raises(ValueError, match=r"length is 20, but the text has 41 characters; .* at least 42"):
        split(np.zeros(41, int), 20)


def test_impossible_shapes_are_refused():
    rng = np.random.default_rng(11)
    with pytest.raises(ValueError, match="width is 16; it must be a multiple of heads, 3"):
        model_of(rng, heads=3, kv_heads=3)
    with pytest.raises(ValueError, match="heads is 4; it must be a multiple of kv_heads, 3"):
        model_of(rng, heads=4, kv_heads=3)


def command(*arguments):
    path = os.pathsep.join((str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, SCRIPTS / "train_gpt.py", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(text_of(np.random.default_rng(12)), encoding="utf-8")
    return path


def test_json_is_one_document_that_says_how_training_went(text_file):
    options = ("--steps", 40, "--kv-heads", 1, "--dtype", "bfloat16", "--backend", "numpy", "--json")
    result = command(text_file, *TINY, *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["text"] == str(text_file)
    assert (report["backend"], report["device"]) == ("numpy", "CPU")
    assert report["options"]["kv_heads"] == 1
    assert report["tokens_per_second"] == pytest.approx(40 * 4 * 16 / report["seconds"])
    assert len(report["step_losses"]) == 40
    for part in ("train", "held_out"):
        assert report["loss_at_end"][part] < 0.9 * report["loss_at_start"][part]
    assert len(report["sample"]) == 40
    assert set(report["sample"]) <= set(text_file.read_text(encoding="utf-8"))


def test_the_report_for_people_names_device_losses_and_sample(text_file):
    result = command(text_file, *TINY, "--steps", 2, "--attention", "standard", "--backend", "numpy")
    assert result.returncode == 0, result.stderr
    for expected in ("standard attention in float32 on CPU", "tokens/s", "held out", "at the end", "Sample"):
        assert expected in " ".join(result.stdout.split())


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_a_gpu_gives_the_losses_of_the_cpu(text_file, attention, dtype, tolerance):
    losses = {}
    for backend in ("numpy", "cuda"):
        options = ("--attention", attention, "--dtype", dtype, "--kv-heads", 1, "--steps", 30, "--json")
        result = command(text_file, *TINY, *options, "--backend", backend)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["backend"] == backend
        losses[backend] = report["step_losses"]
    np.testing.assert_allclose(losses["cuda"], losses["numpy"], rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_on_tensor_cores_train_as_well_as_standard_attention_in_float32(text_file, dtype):
    shape = ("--length", 256, "--batch", 8, "--layers", 2, "--heads", 4, "--kv-heads", 2, "--width", 256)
    losses = []
    for options in (("--attention", "cufa", "--dtype", dtype), ("--attention", "standard")):
        result = command(
            text_file, *shape, *options, "--steps", 80, "--sample", 0, "--backend", "cuda", "--json"
        )
        assert result.returncode == 0, result.stderr
        losses.append(np.mean(json.loads(result.stdout)["step_losses"][-10:]))
    ours, standard = losses
    assert ours < 1
    assert ours == pytest.approx(standard, rel=0.02)


def test_what_is_wrong_with_the_command_line_is_said(tmp_path, text_file):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfd" * 100)
    wrong = {
        "absent.txt' does not exist": (tmp_path / "absent.txt",),
        "binary.txt is not UTF-8 text": (binary,),
        "width is 16; it must be a multiple of heads, 3": (text_file, *TINY, "--heads", 3),
        "needs at least 200002": (text_file, "--length", 100000),
        "try a smaller --learning-rate": (text_file, *TINY, "--learning-rate", 1e30),
    }
    if not device.gpu_present():
        wrong["no GPU"] = (text_file, *TINY, "--backend", "cuda")
    for message, arguments in wrong.items():
        result = command(*arguments)
        assert result.returncode != 0
        assert result.stdout == ""
        assert message in result.stderr
        assert "Traceback" not in result.stderr
        assert "Warning" not in result.stderr
