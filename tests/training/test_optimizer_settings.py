"""Every parameter gets the settings that the optimizer and the parameter groups mean for it; what cannot be meant is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from syncline.arguments import arguments_from_mapping, load_arguments, resolved_yaml
from syncline.errors import UserError
from syncline.modeling.load import build_meta_model
from syncline.runtime.optimization.optimizer import OptimizerSettings
from syncline.strategy.resolve.ineffective import ineffective_warnings
from syncline.strategy.topology import Topology
from syncline.training.job import describe_job
from syncline.training.optimizer_settings import optimizer_settings
from syncline.verification.numerical import verification_job
from tests.modeling.families import tiny_config

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, QUERY = "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight"


def settings_of(family: str = "llama", *, tied: bool = False, **keys: Any) -> dict[str, OptimizerSettings]:
    """The settings of every parameter of a tiny model, by each of its names."""
    model = build_meta_model(tiny_config(family, tied=tied))
    found = optimizer_settings(model, arguments_from_mapping(keys))
    assert len(set(found.all_settings)) == len(found.all_settings)
    assert set(found.of_parameter) == set(model.parameters())
    named = model.named_parameters(remove_duplicate=False)
    return {name: found.all_settings[found.of_parameter[parameter]] for name, parameter in named}


def names_by(all_settings: dict[str, OptimizerSettings], attribute: str) -> dict[Any, set[str]]:
    grouped: dict[Any, set[str]] = {}
    for name, settings in all_settings.items():
        grouped.setdefault(getattr(settings, attribute), set()).add(name)
    return grouped


class TestWithoutGroups:
    @pytest.mark.parametrize("optim", ["adamw", "sgd", "adafactor"])
    def test_matrices_decay_and_nothing_else(self, optim):
        all_settings = settings_of("gpt2", optim=optim, weight_decay=0.1)
        assert {settings.kind for settings in all_settings.values()} == {optim}
        decaying = names_by(all_settings, "weight_decay")
        assert all(name.endswith(".bias") or "ln_" in name for name in decaying[0.0])
        assert {"transformer.wte.weight", "lm_head.weight", "transformer.h.0.attn.c_attn.weight"} <= decaying[0.1]

    def test_equal_rules_are_one(self):
        model = build_meta_model(tiny_config("llama"))
        settings = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
        found = optimizer_settings(model, arguments_from_mapping(settings))
        assert found.all_settings == (OptimizerSettings(beta1=0.8, beta2=0.9, epsilon=1e-6),)
        assert len(optimizer_settings(model, arguments_from_mapping({"weight_decay": 0.1})).all_settings) == 2


class TestMuon:
    @pytest.mark.parametrize("tied", [False, True])
    def test_is_for_the_matrices_of_layers(self, tied):
        all_settings = settings_of(tied=tied, optim="muon", weight_decay=0.1, muon_momentum=0.9, adam_beta1=0.7)
        kinds = names_by(all_settings, "kind")
        assert kinds["adamw"] == {EMBEDDING, HEAD, *(name for name in all_settings if "norm" in name)}
        assert all("_proj" in name for name in kinds["muon"])
        assert len(kinds["muon"]) == 3 * 7
        assert (all_settings[QUERY].momentum, all_settings[EMBEDDING].beta1) == (0.9, 0.7)
        assert names_by(all_settings, "weight_decay")[0.0] == {name for name in all_settings if "norm" in name}

    def test_is_neither_for_experts_in_one_tensor_nor_for_positions(self):
        kinds = names_by(settings_of("qwen3_moe", optim="muon"), "kind")
        assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= kinds["adamw"]
        assert "model.layers.0.mlp.gate.weight" in kinds["muon"]
        kinds = names_by(settings_of("gpt2", optim="muon"), "kind")
        assert {"transformer.wpe.weight", "transformer.wte.weight", "transformer.h.0.attn.c_attn.bias"} <= kinds[
            "adamw"
        ]
        assert "transformer.h.0.attn.c_attn.weight" in kinds["muon"]

    def test_groups_keep_the_kinds(self):
        groups = [{"pattern": "layers|embed", "learning_rate": 1e-3}]
        all_settings = settings_of(optim="muon", learning_rate=1e-4, parameter_groups=groups)
        assert (all_settings[QUERY].kind, all_settings[EMBEDDING].kind, all_settings[NORM].kind) == (
            "muon",
            "adamw",
            "adamw",
        )
        assert {settings.learning_rate for name, settings in all_settings.items() if "layers" in name} == {10.0}


class TestGroups:
    def test_the_first_match_decides_and_what_is_not_said_is_as_in_the_run(self):
        groups = [
            {"pattern": "embed_tokens|lm_head", "weight_decay": 0.0, "learning_rate": 2e-5},
            {"pattern": r"layers\.0\.input_layernorm"},
            {"pattern": "norm", "learning_rate": "1e-3"},
            {"pattern": r"layers\.1\.", "weight_decay": 0.3},
        ]
        all_settings = settings_of(learning_rate=1e-4, weight_decay=0.1, parameter_groups=groups)

        def settings(name: str) -> tuple[float, float]:
            return all_settings[name].learning_rate, all_settings[name].weight_decay

        assert settings(EMBEDDING) == settings(HEAD) == (pytest.approx(0.2), 0.0)
        assert settings(NORM) == (1.0, 0.0)
        assert settings("model.layers.1.input_layernorm.weight") == (pytest.approx(10.0), 0.0)
        assert settings(QUERY) == (1.0, 0.3)
        assert settings("model.layers.0.self_attn.q_proj.weight") == (1.0, 0.1)

    def test_an_explicit_decay_applies_to_norms_too(self):
        all_settings = settings_of(parameter_groups=[{"pattern": "norm", "weight_decay": 0.1}])
        assert names_by(all_settings, "weight_decay")[0.1] == {name for name in all_settings if "norm" in name}

    @pytest.mark.parametrize("pattern", ["embed_tokens", "lm_head"])
    @pytest.mark.parametrize("stages", [1, 2])
    def test_tied_copies_share_the_rule_whichever_name_is_found(self, pattern, stages):
        keys = {
            "model_config": {**LLAMA, "tie_word_embeddings": True},
            "pipeline_parallel_degree": stages,
            "learning_rate": 1.0,
            "parameter_groups": [{"pattern": pattern, "learning_rate": 0.25}],
        }
        job = describe_job(arguments_from_mapping(keys))
        copies = [spec for spec in job.layout.specs if spec.name in (EMBEDDING, HEAD)]
        assert len(copies) == stages
        assert {job.optimizer_settings[spec.settings].learning_rate for spec in copies} == {0.25}
        assert {
            job.optimizer_settings[spec.settings].learning_rate for spec in job.layout.specs if spec not in copies
        } == {1.0}

    def test_buckets_hold_the_rules_of_the_job(self):
        groups = [{"pattern": "norm", "learning_rate": 1e-3}, {"pattern": "q_proj", "weight_decay": 0.3}]
        job = describe_job(
            arguments_from_mapping({"model_config": LLAMA, "weight_decay": 0.1, "parameter_groups": groups})
        )
        of_spec = {spec.name: spec.settings for spec in job.layout.specs}
        slots = [slot for bucket in job.layout.buckets for slot in bucket.slots]
        assert {slot.name: slot.settings for slot in slots} == of_spec
        assert set(of_spec.values()) == set(range(len(job.optimizer_settings))) == {0, 1, 2}

    def test_a_learning_rate_of_zero_is_a_factor_like_another(self):
        all_settings = settings_of(parameter_groups=[{"pattern": "embed", "learning_rate": 0}])
        assert all_settings[EMBEDDING].learning_rate == 0.0


class TestReading:
    def test_files_and_command_lines_say_the_same(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text(
            "model_config: {model_type: llama}\n"
            "parameter_groups:\n"
            "  - pattern: 'embed_tokens|lm_head'\n"
            "    weight_decay: 0.0\n"
            "    learning_rate: 2.0e-5\n"
            "  - {pattern: norm, learning_rate: null}\n"
        )
        expected = (
            {"pattern": "embed_tokens|lm_head", "learning_rate": 2e-5, "weight_decay": 0.0},
            {"pattern": "norm"},
        )
        arguments = load_arguments(path)
        assert arguments.parameter_groups == expected
        words = "[{pattern: embed_tokens|lm_head, weight_decay: 0, learning_rate: 2e-5}, {pattern: norm}]"
        path.write_text("model_config: {model_type: llama}\n")
        assert load_arguments(path, ["--parameter_groups", words]).parameter_groups == expected
        path.write_text(resolved_yaml(arguments))
        assert load_arguments(path) == arguments
        assert load_arguments(path, ["--parameter_groups", "null"]).parameter_groups == ()

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ("embed", "parameter_groups=embed: must be a list of mappings. Write parameter_groups: [{pattern:"),
            ({"pattern": "embed"}, "must be a list of mappings"),
            ([{"pattern": "embed"}, "norm"], "must be a list of mappings"),
            ([{"pattern": "a"}, {"patern": "b"}], "patern in entry 2 of parameter_groups: no such key. The nearest is"),
            ([{1: "b"}], "1 in entry 1 of parameter_groups: no such key"),
            ([{"learning_rate": 1e-3}], "entry 1 of parameter_groups: has no pattern. Add one"),
            ([{"pattern": None, "weight_decay": 0.1}], "has no pattern"),
            ([{"pattern": "("}], "entry 1 of parameter_groups, pattern=(: not a regular expression (missing )"),
            ([{"pattern": ["a", "b"]}], "entry 1 of parameter_groups, pattern=['a', 'b']: must be text"),
            ([{"pattern": "a", "weight_decay": "x"}], "entry 1 of parameter_groups, weight_decay=x: must be a number"),
            ([{"pattern": "a", "weight_decay": True}], "weight_decay=True: must be a number"),
            ([{"pattern": "a", "learning_rate": -1}], "learning_rate=-1: must be at least 0"),
        ],
    )
    def test_mistakes(self, groups, message):
        with pytest.raises(UserError) as caught:
            arguments_from_mapping({"parameter_groups": groups})
        assert message in str(caught.value)


class TestRefusals:
    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            (
                [{"pattern": "norm"}, {"pattern": "layer_norm"}],
                "entry 2 of parameter_groups, pattern 'layer_norm': it matches no parameter. Parameters have names",
            ),
            (
                [{"pattern": "lm_head"}, {"pattern": "norm"}, {"pattern": "input_layernorm"}],
                "pattern 'input_layernorm': earlier entries match all that it matches (entry 2, pattern 'norm')",
            ),
            (
                [{"pattern": "q_proj|k_proj"}, {"pattern": "q_"}, {"pattern": "k_"}],
                "(entry 1, pattern 'q_proj|k_proj')",
            ),
        ],
    )
    @pytest.mark.parametrize("prepare", [describe_job, verification_job])
    def test_a_group_without_parameters(self, groups, message, prepare):
        with pytest.raises(UserError) as caught:
            prepare(arguments_from_mapping({"model_config": LLAMA, "parameter_groups": groups}))
        assert message in str(caught.value)

    def test_a_tied_parameter_belongs_to_the_first_of_its_names(self):
        groups = [{"pattern": "lm_head"}, {"pattern": "embed_tokens", "weight_decay": 0.1}]
        assert settings_of(parameter_groups=groups)[EMBEDDING].weight_decay == 0.1
        with pytest.raises(UserError, match=r"'embed_tokens': earlier entries match all .*entry 1, pattern 'lm_head'"):
            settings_of(tied=True, parameter_groups=groups)

    def test_a_learning_rate_in_a_run_without_one(self):
        with pytest.raises(UserError, match=r"learning_rate=0 and a learning_rate in parameter_groups: .* by a factor"):
            settings_of(learning_rate=0.0, parameter_groups=[{"pattern": "norm", "learning_rate": 1e-3}])
        assert settings_of(learning_rate=0.0, parameter_groups=[{"pattern": "norm", "weight_decay": 0.1}])


class TestWarnings:
    def warnings(self, **keys: Any) -> list[str]:
        return ineffective_warnings(arguments_from_mapping(keys), Topology())

    @pytest.mark.parametrize("option", ["adam_beta1", "adam_beta2", "adam_epsilon"])
    def test_adam_settings_count_for_muon_too(self, option):
        for optim, warned in (("adamw", False), ("muon", False), ("sgd", True), ("adafactor", True)):
            assert any(option in line for line in self.warnings(optim=optim, **{option: 0.5})) == warned

    @pytest.mark.parametrize(("optim", "warned"), [("muon", False), ("adamw", True), ("adafactor", True)])
    def test_momentum_is_of_muon(self, optim, warned):
        assert any("muon_momentum" in line for line in self.warnings(optim=optim, muon_momentum=0.9)) == warned

    def test_groups_that_set_nothing(self):
        (line,) = self.warnings(parameter_groups=[{"pattern": "norm"}, {"pattern": "embed"}])
        assert line == "parameter_groups has no effect here: no entry sets a learning_rate or a weight_decay."
        assert not self.warnings(parameter_groups=[{"pattern": "norm"}, {"pattern": "embed", "weight_decay": 0.1}])

    def test_a_group_that_is_frozen(self):
        groups = [{"pattern": "norm", "weight_decay": 0.1}, {"pattern": "embed", "weight_decay": 0.1}]
        keys = {"model_config": LLAMA, "parameter_groups": groups, "freeze_parameters": ["embed", "input_layernorm"]}
        (line,) = describe_job(arguments_from_mapping(keys)).strategy.warnings
        assert line == "Entry 2 of parameter_groups has no effect here: all that it decides is frozen."


class TestSmallShapes:
    def test_groups_of_layers_that_the_small_model_lacks_are_left_out(self):
        groups = [
            {"pattern": r"layers\.20\.", "learning_rate": 1e-3},
            {"pattern": r"layers\.0\.", "learning_rate": 1e-4},
            {"pattern": "q_proj", "weight_decay": 0.1},
        ]
        keys = {"model_config": {**LLAMA, "num_hidden_layers": 24}, "parameter_groups": groups}
        job = verification_job(arguments_from_mapping(keys))
        assert job.arguments.parameter_groups == tuple(groups[1:])
