"""Reading arguments: every option is documented, every spelling is understood, every mistake gets its three parts."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncline
from syncline.arguments import OPTIONS, TrainingArguments, arguments_from_mapping, load_arguments, resolved_yaml
from syncline.arguments.flags import CONFIGS, FLAGS, FLAGS_OF
from syncline.arguments.foreign import MEANINGLESS, REFUSALS, TRANSLATIONS
from syncline.arguments.help import help_text
from syncline.arguments.loading import read_overrides
from syncline.arguments.option import GROUPS, Option
from syncline.arguments.serialization import read_yaml
from syncline.errors import UserError

MODEL = {"model_config": {"model_type": "llama", "hidden_size": 32}}


def written(folder, text, name="config.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*sources) -> UserError:
    with pytest.raises(UserError) as caught:
        arguments_from_mapping(*sources)
    error = caught.value
    assert error.given
    assert error.wrong
    assert error.instead.endswith((".", "`"))
    assert str(error) == f"{error.given}: {error.wrong}. {error.instead}"
    return error


class TestDocumentation:
    @pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
    def test_every_option_says_what_it_means_does_and_costs(self, option: Option):
        assert option.group in GROUPS
        assert option.help.endswith((".", ").", "`"))
        assert option.effect
        assert option.cost.endswith(".")

    def test_every_field_but_the_notices_is_an_option(self):
        assert {each.name for each in dataclasses.fields(TrainingArguments)} - set(OPTIONS) == {"notices"}

    def test_help_is_complete_and_grouped(self):
        text = help_text()
        assert all(f"--{name} " in text for name in OPTIONS)
        assert all(f"{group}:" in text for group in GROUPS)
        assert all(flag.name in text for flag in FLAGS)

    def test_help_of_one_group_has_that_group_only(self):
        text = help_text(["Data"])
        assert "--train_data" in text
        assert "--learning_rate" not in text

    def test_no_name_means_two_things(self):
        names = [*OPTIONS, *(alias for option in OPTIONS.values() for alias in option.aliases)]
        foreign = [*(key for key in TRANSLATIONS if key not in OPTIONS), *REFUSALS, *MEANINGLESS]
        assert len([*names, *foreign]) == len({*names, *foreign})


READ_BY_NO_ATTRIBUTE = {
    **dict.fromkeys(
        ("pipeline_parallel_config", "tensor_parallel_config"),
        "syncline.strategy.resolve.flags reads all four in one loop",
    ),
    **dict.fromkeys(("release_grads", "offload_activations"), "syncline.strategy reads them by name, with their flags"),
    "sequence_parallel": "arrives with tensor parallelism; without it always a warning",
    "save_total_limit": "arrives with checkpoints; without them always a warning",
}


def names_read_outside_arguments() -> set[str]:
    """Every `NAME` in `arguments.NAME`, `job.arguments.NAME`, or `a.NAME` in the table of what arrives later.

    The table of options without effect does not count: an option that only it reads has none.
    """
    package = Path(syncline.__file__).parent
    files = [path for path in package.rglob("*.py") if "arguments" not in path.parts and path.name != "no_effect.py"]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_arguments(node.value)}


def is_arguments(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in ("arguments", "a")


class TestUse:
    def test_every_option_is_read_somewhere(self):
        assert set(OPTIONS) - names_read_outside_arguments() == set(READ_BY_NO_ATTRIBUTE)


class TestFiles:
    def test_yaml(self, tmp_path):
        path = written(
            tmp_path, "model_config: {model_type: llama, rms_norm_eps: 1e-6}\nlearning_rate: 1e-4\nbf16: true\n"
        )
        arguments = load_arguments(path)
        assert arguments.learning_rate == 1e-4
        assert arguments.dtype == "bfloat16"
        assert arguments.model_config == {"model_type": "llama", "rms_norm_eps": 1e-6}

    def test_json(self, tmp_path):
        path = written(tmp_path, json.dumps({**MODEL, "seed": 7, "train_data": ["a", "b"]}), "config.json")
        arguments = load_arguments(path)
        assert (arguments.seed, arguments.train_data) == (7, ("a", "b"))

    @pytest.mark.parametrize(
        ("name", "text", "wrong"),
        [
            ("config.yaml", "seed: [1\nmax_steps: 3\n", "cannot be parsed (line 2"),
            ("config.yaml", "seed: 1\nmax_steps: 3\nseed: 2\n", "line 3: seed stands twice"),
            ("config.yaml", "just text", "does not hold keys"),
            ("config.json", '{"seed": 1,}', "cannot be parsed (line 1"),
            ("config.json", '{"seed": 1, "seed": 2}', "seed stands twice"),
            ("config.yaml", "seed: 1\n", "names no model"),
        ],
    )
    def test_a_malformed_file_is_refused_with_the_place(self, tmp_path, name, text, wrong):
        with pytest.raises(UserError, match=re.escape(wrong)) as caught:
            load_arguments(written(tmp_path, text, name))
        assert caught.value.given == str(tmp_path / name)

    def test_an_unreadable_file_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            load_arguments(tmp_path / "missing.yaml")
        (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match="not UTF-8"):
            load_arguments(tmp_path / "binary.yaml")

    def test_null_is_the_default(self):
        assert arguments_from_mapping({"optim": None, "max_steps": None}) == arguments_from_mapping({})

    def test_a_file_of_paddlenlp_works_as_it_is(self):
        arguments = arguments_from_mapping(
            {
                "model_name_or_path": "facebook/llama-7b",
                "tokenizer_name_or_path": "facebook/llama-7b",
                "input_dir": "./data",
                "tensor_parallel_degree": -1,
                "sequence_parallel": 0,
                "use_flash_attention": True,
                "bf16": 1,
                "fp16_opt_level": "O2",
                "context_parallel_degree": -1,
                "dataloader_num_workers": 1,
                "do_train": True,
                "disable_tqdm": True,
                "recompute": 1,
                "device": "gpu",
                "eval_steps": 1000,
                "evaluation_strategy": "steps",
            }
        )
        assert arguments.train_data == ("./data",)
        assert arguments.tensor_parallel_degree == arguments.sep_parallel_degree == 1
        assert (arguments.device, arguments.dtype, arguments.progress) == ("cuda", "bfloat16", "plain")
        assert arguments.recompute is True
        assert {notice.split()[0] for notice in arguments.notices} == {
            "use_flash_attention",
            "dataloader_num_workers",
            "do_train",
        }


class TestOverrides:
    def load(
        self, *words, config="model_config: {model_type: llama, hidden_size: 32}\nlearning_rate: 3e-4\n", folder=None
    ):
        return load_arguments(written(folder, config), list(words))

    def test_they_win_and_are_typed_by_their_option(self, tmp_path):
        arguments = self.load(
            "--learning_rate",
            "1e-4",
            "--seed=5",
            "--recompute",
            "--shuffle",
            "off",
            "--max_steps",
            "-1",
            folder=tmp_path,
        )
        assert (arguments.learning_rate, arguments.seed, arguments.max_steps) == (1e-4, 5, -1)
        assert arguments.recompute is True
        assert arguments.shuffle is False

    def test_text_stays_text(self, tmp_path):
        assert self.load("--text_field", "1e4", folder=tmp_path).text_field == "1e4"

    @pytest.mark.parametrize("words", [["--train_data", "a", "b"], ["--train_data", "[a, b]"], ["--train_data=[a, b]"]])
    def test_lists(self, tmp_path, words):
        assert self.load(*words, folder=tmp_path).train_data == ("a", "b")

    def test_entries_of_a_mapping(self, tmp_path):
        arguments = self.load(
            "--model_config.hidden_size", "64", "--model_config.rope_parameters.factor=2.0", folder=tmp_path
        )
        assert arguments.model_config == {
            "model_type": "llama",
            "hidden_size": 64,
            "rope_parameters": {"factor": 2.0},
        }

    def test_null_takes_a_key_of_the_file_away(self, tmp_path):
        arguments = self.load("--model_config", "null", "--model_name_or_path", "gpt2", folder=tmp_path)
        assert arguments.model_config is None
        assert arguments.tokenizer_name_or_path == "gpt2"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--seed", "1", "--seed", "2"], "--seed: given twice"),
            (["--seed"], "--seed: has no value"),
            (["--seed", "1", "2"], "more than one value"),
            (["stray"], "stray: belongs to no key"),
            (["--gradient_acumulation_steps", "2"], "The nearest is gradient_accumulation_steps."),
            (["--model_config", "[1"], "cannot be parsed"),
            (["--model_config", "3"], "must be a mapping"),
            (["--recompute", "--gradient_checkpointing", "false"], "both decide recompute"),
        ],
    )
    def test_mistakes(self, tmp_path, words, message):
        with pytest.raises(UserError, match=re.escape(message)):
            self.load(*words, folder=tmp_path)


class TestValues:
    @pytest.mark.parametrize(
        ("name", "value", "wrong"),
        [
            ("per_device_train_batch_size", -2, "must be at least 1"),
            ("gradient_accumulation_steps", 0, "must be at least 1"),
            ("gradient_accumulation_steps", True, "must be a whole number"),
            ("gradient_accumulation_steps", 1.5, "must be a whole number"),
            ("pipeline_parallel_degree", -3, "must be at least 1"),
            ("learning_rate", "fast", "must be a number"),
            ("learning_rate", float("nan"), "must be a number"),
            ("validation_split", 1.0, "must be at least 0 and less than 1"),
            ("gradient_bucket_size_MB", 0, "must be greater than 0"),
            ("recompute", "maybe", "must be true or false"),
            ("output_dir", 3, "must be text"),
            ("train_data", 3, "must be text or a list of texts"),
            ("model_config", "llama", "must be a mapping"),
            ("optim", "adam", "must be one of adamw, sgd"),
            ("sharding", "stage4", "no such sharding stage"),
            ("freeze_parameters", "(", "not a regular expression"),
            ("data_parallel_config", 3, "must be flags"),
        ],
    )
    def test_a_wrong_value_is_refused(self, name, value, wrong):
        error = refusal({name: value})
        assert error.given == f"{name}={value}"
        assert wrong in error.wrong

    def test_the_nearest_choice_is_offered(self):
        assert refusal({"lr_scheduler_type": "cosin"}).instead == "The nearest is cosine."

    @pytest.mark.parametrize(
        "source",
        [
            {"model_name_or_path": "gpt2", **MODEL},
            {"model_config": {"hidden_size": 3}},
            {"learning_rate": 1e-4, "min_learning_rate": 1e-3},
            {"bf16": True, "dtype": "float32"},
        ],
    )
    def test_contradictions_are_refused(self, source):
        refusal(source)

    def test_numbers_may_be_text_and_whole_numbers_may_have_an_exponent(self):
        assert arguments_from_mapping({"learning_rate": "1e-4"}).learning_rate == 1e-4
        assert arguments_from_mapping({"max_data_bytes": "1e6"}).max_data_bytes == 1_000_000
        assert arguments_from_mapping({"seed": str(2**60 + 1)}).seed == 2**60 + 1

    @pytest.mark.parametrize(
        ("name", "value", "read"),
        [
            ("output_dir", "~/run", "/home/someone/run"),
            ("data_cache_folder", "~", "/home/someone"),
            (
                "train_data",
                ["~/a/*.txt", "b~.txt", "random-tokens"],
                ("/home/someone/a/*.txt", "b~.txt", "random-tokens"),
            ),
            ("validation_data", "~/a.txt", ("/home/someone/a.txt",)),
            ("tokenizer_name_or_path", "~/tokenizer", "/home/someone/tokenizer"),
            ("tokenizer_name_or_path", "train-bpe:300", "train-bpe:300"),
            ("model_name_or_path", "~/model", "/home/someone/model"),
            ("model_name_or_path", "facebook/llama-7b", "facebook/llama-7b"),
        ],
    )
    def test_a_path_may_begin_at_home(self, monkeypatch, name, value, read):
        monkeypatch.setenv("HOME", "/home/someone")
        assert getattr(arguments_from_mapping({name: value}), name) == read

    def test_a_tokenizer_beside_the_model_is_found_at_home_too(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/someone")
        arguments = arguments_from_mapping({"model_name_or_path": "~/model"})
        assert arguments.tokenizer_name_or_path == "/home/someone/model"

    def test_a_plain_no_in_yaml_is_the_choice_no(self):
        assert arguments_from_mapping(read_yaml("save_strategy: no")).save_strategy == "no"


class TestFlags:
    @pytest.mark.parametrize(
        "value",
        [
            "gradient_sync_after_accumulate enable_release_grads",
            "gradient_sync_after_accumulate,enable_release_grads",
            " gradient_sync_after_accumulate, enable_release_grads, enable_release_grads,",
            ["gradient_sync_after_accumulate", "enable_release_grads"],
        ],
    )
    def test_strings_and_lists(self, value):
        flags = arguments_from_mapping({"data_parallel_config": value}).data_parallel_config
        assert flags == ("gradient_sync_after_accumulate", "enable_release_grads")

    @pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
    def test_every_spelling_is_known_in_every_place(self, flag):
        for config in flag.configs:
            for spelling in (flag.name, *flag.aliases):
                assert getattr(arguments_from_mapping({config: spelling}), config) == (flag.name,)

    def test_both_spellings_of_the_average(self):
        flag = "enable_allreduce_avg_in_{}_scale"
        spelled = f"{flag.format('gradinent')} {flag.format('gradient')}"
        assert arguments_from_mapping({"data_parallel_config": spelled}).data_parallel_config == (
            flag.format("gradient"),
        )

    def test_an_unknown_flag_is_refused_with_the_nearest(self):
        error = refusal({"pipeline_parallel_config": "enable_relase_grads"})
        assert error.instead == "The nearest is enable_release_grads."
        error = refusal({"pipeline_parallel_config": "gradient_sync_after_acumulate"})
        assert error.instead == "The nearest is gradient_sync_after_accumulate (in data_parallel_config)."

    def test_a_flag_in_the_wrong_place_is_refused_with_the_right_one(self):
        error = refusal({"pipeline_parallel_config": "split_param"})
        assert error.instead == "Write it in sharding_parallel_config instead."

    def test_no_spelling_stands_twice(self):
        spellings = [spelling for flag in FLAGS for spelling in (flag.name, *flag.aliases)]
        assert len(spellings) == len(set(spellings))
        assert all(FLAGS_OF[config] for config in CONFIGS)


class TestForeignKeys:
    def test_every_key_of_the_installed_transformers_is_known(self):
        from transformers import TrainingArguments as HuggingFaceArguments

        known = {*OPTIONS, *TRANSLATIONS, *REFUSALS, *MEANINGLESS}
        known |= {alias for option in OPTIONS.values() for alias in option.aliases}
        assert {each.name for each in dataclasses.fields(HuggingFaceArguments)} - known == set()

    @pytest.mark.parametrize("key", MEANINGLESS)
    def test_a_meaningless_key_is_a_notice_by_name(self, key):
        (notice,) = arguments_from_mapping({key: 1}).notices
        assert notice == f"{key} means nothing here: {MEANINGLESS[key]}."

    @pytest.mark.parametrize("key", REFUSALS)
    def test_a_refused_key_is_fine_when_switched_off(self, key):
        assert arguments_from_mapping({key: None}) == arguments_from_mapping({})
        assert refusal({key: "something"}).given == f"{key}=something"

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ({"bf16": True}, {"dtype": "bfloat16"}),
            ({"bf16": False}, {}),
            ({"fp16": True}, {"dtype": "float16"}),
            ({"eval_strategy": "no"}, {"eval_steps": None}),
            ({"evaluation_strategy": "steps", "eval_steps": 5}, {"eval_steps": 5}),
            ({"train_sampling_strategy": "sequential"}, {"shuffle": False}),
            ({"use_cpu": True}, {"device": "cpu"}),
            ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1}),
            ({"warmup_steps": "0.1"}, {"warmup_ratio": 0.1}),
            (read_overrides(["--warmup_steps", "0.1"]), {"warmup_ratio": 0.1}),
            (read_overrides(["--warmup_steps", "10"]), {"warmup_steps": 10}),
            ({"optim": "adamw_torch_fused"}, {"optim": "adamw"}),
            ({"ddp_timeout": 30}, {"distributed_timeout_seconds": 30}),
            ({"report_to": ["tensorboard"]}, {"report_to": "tensorboard"}),
        ],
    )
    def test_translations(self, theirs, ours):
        assert arguments_from_mapping(theirs) == arguments_from_mapping(ours)

    def test_evaluation_by_epoch_is_refused(self):
        assert "eval_steps" in refusal({"eval_strategy": "epoch"}).instead

    def test_later_sources_win_over_translations(self):
        assert arguments_from_mapping({"dtype": "float64"}, {"bf16": True}).dtype == "bfloat16"

    @pytest.mark.parametrize(
        ("earlier", "later"),
        [
            ({"bf16": True}, {"bf16": "false"}),
            ({"warmup_steps": 0.1}, {"warmup_steps": "10"}),
            ({"warmup_steps": 100}, {"warmup_steps": "0.1"}),
            ({"deepspeed": "stage2.json"}, {"deepspeed": None}),
        ],
    )
    def test_a_repeated_key_leaves_nothing_of_its_earlier_value(self, earlier, later):
        assert arguments_from_mapping(earlier, later) == arguments_from_mapping(later)


def values_of(option: Option) -> st.SearchStrategy:
    if option.parse:
        return {
            "sharding": st.sampled_from(["stage1", "stage2 offload"]),
            "pp_seg_method": st.sampled_from(["uniform", "layer:Decoder.*Layer", "8,8,6"]),
            "parameter_groups": st.lists(
                st.fixed_dictionaries({"pattern": st.just("norm")}, optional={"weight_decay": st.floats(0, 1)})
            ),
            **{name: st.lists(st.sampled_from(flags)) for name, flags in FLAGS_OF.items()},
        }[option.name]
    if option.choices:
        return st.sampled_from(option.choices)
    low = option.minimum if option.minimum is not None else option.above
    texts = st.text(st.characters(exclude_categories=["Cs"]))
    return {
        bool: st.booleans(),
        int: st.integers(int(low or 0), 10**12),
        float: st.floats(
            low,
            option.below if option.below is not None else option.maximum or 1e6,
            exclude_min=option.above is not None,
            exclude_max=option.below is not None,
        ),
        str: texts,
        tuple: st.lists(texts.map(re.escape)),
        dict: st.dictionaries(texts, st.one_of(texts, st.integers(), st.booleans())).map(
            lambda each: {**each, "model_type": "llama"}
        ),
    }[option.type]


ROUND_TRIP = {name: values_of(option) for name, option in OPTIONS.items() if name != "model_name_or_path"}


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=ROUND_TRIP))
def test_resolved_yaml_loads_back_to_equal_arguments(tmp_path_factory, source):
    source = {**MODEL, **source}
    source["min_learning_rate"] = min(source.get("learning_rate", 5e-5), source.get("min_learning_rate", 0.0))
    arguments = arguments_from_mapping(source)
    path = written(tmp_path_factory.getbasetemp(), resolved_yaml(arguments))
    assert load_arguments(path) == arguments


def test_replacing_a_field_checks_it():
    arguments = TrainingArguments(seed=3)
    assert dataclasses.replace(arguments, world_size=4).world_size == 4
    with pytest.raises(UserError):
        dataclasses.replace(arguments, world_size=0)
