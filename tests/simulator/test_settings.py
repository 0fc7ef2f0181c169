"""Options by their dotted names."""

from __future__ import annotations

import pytest

from pollux.errors import InvalidSpec, UnknownName
from pollux.policies import registry
from pollux.simulator.compat import PRESETS, options_of, preset
from pollux.simulator.options import AgentOptions, Options, RankOrder, WorldOptions
from pollux.simulator.settings import applied, known, parse


class TestParse:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1", 1),
            ("0.5", 0.5),
            ("1e3", 1000.0),
            ("true", True),
            ("False", False),
            ("null", None),
            ("None", None),
            ("by-node", "by-node"),
            ('["a", "b"]', ["a", "b"]),
            ("", ""),
            ("a=b", "a=b"),
            (" 3 ", 3),
        ],
    )
    def test_values_are_json_or_text(self, text, value):
        (found,) = parse([f"world.x={text}"]).values()
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize("wrong", ["world.interference", "=3", " = 3", ""])
    def test_what_is_not_key_and_value_is_refused(self, wrong):
        with pytest.raises(InvalidSpec, match=r"is not key=value\. Write for example"):
            parse([wrong])

    def test_the_last_of_one_name_wins(self):
        assert parse(["seed=1", "seed=2"]) == {"seed": 2}


class TestApplied:
    def test_sets_any_option_and_leaves_the_others(self):
        found = applied(
            Options(),
            {
                "world.interference": 0.25,
                "world.rank_order": "by-node",
                "world.node_mtbf_s": 100,
                "agent.pinned": "ncf, bert",
                "scheduler.in_place": True,
                "policy.backfill": True,
                "policy.other": 3,
                "interval_s": 30,
                "seed": 5,
            },
        )
        assert found.world == WorldOptions(interference=0.25, rank_order=RankOrder.BY_NODE, node_mtbf_s=100.0)
        assert found.agent == AgentOptions(pinned=("ncf", "bert"))
        assert found.scheduler.in_place
        assert found.policy == {"backfill": True, "other": 3}
        assert (found.interval_s, found.seed) == (30.0, 5)
        assert applied(Options(), {}) == Options()

    @pytest.mark.parametrize(
        ("key", "hint"),
        [
            ("wrld.interference", r"mean 'world\.interference'.*agent\.pinned.*interval_s, policy\.<option>"),
            ("nonsense", r"scheduler\.in_place, seed, world\.interference.*world\.whole_seconds"),
            ("world", "world.realloc_delay_s"),
            ("policy", "policy.<option>"),
            ("world.interferance", "Did you mean 'world.interference'"),
            ("agent.x", "agent.report_interval_s"),
            ("scheduler.inplace", "Did you mean 'scheduler.in_place'"),
            ("world.", "world.interference"),
            ("scheduler.seed", "Known: scheduler.in_place"),
        ],
    )
    def test_an_unknown_name_is_answered_with_the_known_ones(self, key, hint):
        with pytest.raises(UnknownName, match=hint):
            applied(Options(), {key: 1})

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("world.whole_seconds", "yes", r"world.whole_seconds = 'yes': must be true or false"),
            ("world.interference", "much", r"world.interference = 'much'"),
            ("world.interference", 1.0, "must be below 1"),
            ("world.realloc_delay_s", -1, "at least 0"),
            ("world.realloc_delay_s", None, "world.realloc_delay_s = None"),
            ("world.max_time_s", float("nan"), "world.max_time_s"),
            ("world.rank_order", "random", "largest-first"),
            ("agent.report_interval_s", 0, "greater than 0"),
            ("agent.pinned", 5, "agent.pinned = 5"),
            ("interval_s", 0, "interval_s"),
            ("interval_s", True, "interval_s"),
            ("seed", -1, "seed"),
            ("seed", 1.5, "seed"),
            ("seed", "x", "seed = 'x'"),
        ],
    )
    def test_a_wrong_value_is_refused_by_its_full_name(self, key, value, message):
        with pytest.raises(InvalidSpec, match=message):
            applied(Options(), {key: value})

    def test_every_name_that_is_said_to_be_known_is(self):
        names = [name for name in known(Options()) if not name.startswith("policy.")]
        values = {"interval_s": 60.0, "early_gap_s": None, "seed": 0}
        for name in names:
            section, _, field = name.partition(".")
            value = values[name] if name in values else getattr(getattr(Options(), section), field)
            assert applied(Options(), {name: list(value) if isinstance(value, tuple) else value}) == Options()


class TestPresets:
    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_can_be_applied(self, name):
        assert applied(Options(), preset(name)) != Options()

    def test_what_comes_later_goes_first(self):
        options = applied(Options(), {**preset("artifact"), "agent.pinned": [], "world.whole_seconds": False})
        assert options.agent.pinned == ()
        assert not options.world.whole_seconds
        assert options.agent.single_gpu_accumulation

    def test_every_policy_can_be_made_with_what_a_preset_says(self):
        names = registry.names()
        for name, options in options_of(names, {}, "artifact").items():
            registry.make(name, options.policy)
            assert options.world.whole_seconds

    def test_a_preset_may_say_more_under_a_policy(self):
        found = options_of(["pollux", "optimus"], {"policy.p": 1.0}, "artifact")
        assert found["pollux"].policy["solver"] == "genetic"
        assert found["pollux"].policy["churn_factor"] == 1.0
        assert found["pollux"].policy["p"] == 1.0
        assert found["pollux"].world.rank_order is RankOrder.BY_NODE
        assert found["optimus"].policy == {}
        assert found["optimus"].world.rank_order is RankOrder.LARGEST_FIRST

    def test_settings_go_before_the_preset(self):
        found = options_of(["pollux"], {"policy.solver": "priced", "world.rank_order": "largest-first"}, "artifact")
        assert found["pollux"].policy["solver"] == "priced"
        assert found["pollux"].world.rank_order is RankOrder.LARGEST_FIRST

    def test_agents_of_the_artifact_report_with_the_rounds(self):
        assert options_of(["optimus"], {"interval_s": 30.0}, "artifact")["optimus"].agent.report_interval_s == 30.0
        given = {"interval_s": 30.0, "agent.report_interval_s": 15.0}
        assert options_of(["optimus"], given, "artifact")["optimus"].agent.report_interval_s == 15.0
        assert options_of(["optimus"], {"interval_s": 300.0})["optimus"].agent.report_interval_s == 30.0

    def test_what_a_policy_believes_of_agents_is_what_they_do(self):
        believes = options_of(["pollux", "optimus"], {"agent.published_grid": True})
        assert believes["pollux"].policy == {"published_grid": True}
        assert believes["optimus"].policy == {}
        stubborn = {"agent.published_grid": True, "policy.published_grid": False}
        assert options_of(["pollux"], stubborn)["pollux"].policy == {"published_grid": False}
        assert options_of(["pollux"], {})["pollux"].policy == {}

    def test_an_option_that_none_of_the_policies_has_is_refused(self):
        with pytest.raises(UnknownName, match=r"policy\.q.*policy\.p"):
            options_of(["pollux", "optimus"], {"policy.q": 1.0})

    def test_an_unknown_preset_is_answered_with_the_known_ones(self):
        with pytest.raises(UnknownName, match="Did you mean 'artifact'"):
            preset("artefact")
