"""Rules over several fields. Each message names the field, its value, what is allowed and a fix."""

from __future__ import annotations

import itertools
import math

from specconfig.acceptance import BUILTIN, acceptance_method, is_custom
from specconfig.decisions import Source
from specconfig.errors import ConfigError
from specconfig.method_names import CONFIG_BY_METHOD
from specconfig.registry import load_class
from specconfig.resolving.checkpoint_values import read_checkpoint_values
from specconfig.resolving.synthetic import rates_from_length
from specconfig.resolving.vocabulary import check_same_vocab
from specconfig.speculative import SpeculativeConfig
from specconfig.speculators.base import METHOD_OPTIONS, SpeculatorConfig
from specconfig.speculators.resolution import Resolution

_P = "speculative_config"


def settle(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    """Checks and defaults that need the final class but not the resolved object."""
    _method_options(res, cls)
    _parallel_drafting(res, cls)
    _verification(res, cls)
    _draft_sampling(res, cls)
    _heterogeneous_vocab(res, cls)
    _adaptive(res, cls)
    _dynamic_k(res, cls)
    _schedule(res, cls)
    _hash_settings(res, cls)
    read_checkpoint_values(res, cls.uses_aux_hidden_states)
    cls.check(res)


def _method_options(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    for name in METHOD_OPTIONS:
        value = res.values[name]
        if value is None:
            continue
        if name in cls.supported_options:
            res.log.note(f"{_P}.{name}", value, "given", f"an option of {cls.variant}")
        else:
            supported = sorted(cls.supported_options) or "none of these options"
            raise ConfigError(
                f"{_P}.{name}",
                value,
                f"for {cls.variant}: {supported}",
                f"remove {name}" + _who_supports(name),
                message=f"unsupported option for method {res.custom_method or res.method!r}: "
                f"{name} is {_scope(name)}",
            )


def _scope(name: str) -> str:
    return {
        "dspark_draft_topk": "only supported by DSpark (Qwen3DSparkModel, Qwen3OmniDSparkModel)",
        "draft_lm_head_quantization": "not supported here; only eagle, eagle3 and mtp share a head",
        "index_share_for_mtp_iteration": "only supported with method='mtp'",
        "xpress_topc": "only supported by XPress (a dflash checkpoint with an XPress head)",
    }.get(name, "only read by registered custom methods that list it")


def _who_supports(name: str) -> str:
    return "" if name == "speculator_options" else f"; {name} is {_scope(name)}"


def _parallel_drafting(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    if res.values["parallel_drafting"] and not cls.supports_parallel_drafting:
        raise ConfigError(
            f"{_P}.parallel_drafting",
            True,
            "draft_model (PARD) and eagle3 (P-EAGLE); dflash and dspark always draft in parallel",
            "remove parallel_drafting",
            message=f"parallel_drafting does not apply to method {res.method!r}",
        )


def _verification(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    values = res.values
    method, k = values["rejection_sample_method"], values["num_speculative_tokens"]
    res.acceptance = acceptance_method(method, values["draft_sample_method"] == "probabilistic")
    _synthetic(res, method, k)
    if is_custom(method):
        if not res.acceptance.is_lossless:
            res.log.warn(f"rejection_sample_method={method!r} does not promise to be lossless")
    elif values["acceptance_options"] is not None:
        raise ConfigError(
            f"{_P}.acceptance_options",
            values["acceptance_options"],
            f"none for {method!r}, whose options are fields of their own",
            "remove acceptance_options",
        )
    if method == "fly":
        _fly(res, cls, k)
    else:
        for name in sorted(res.given & set(BUILTIN["fly"].options.values())):
            raise ConfigError(
                f"{_P}.{name}",
                values[name],
                "only with rejection_sample_method='fly'",
                "remove it, or set rejection_sample_method: fly",
            )
    if method == "block" and values["draft_sample_method"] == "greedy":
        res.log.warn(
            "rejection_sample_method='block' gains nothing with one-hot (greedy) drafts at "
            "temperature 0"
        )


def _synthetic(res: Resolution, method: str, k: int) -> None:
    rates = res.values["synthetic_acceptance_rates"]
    length = res.values["synthetic_acceptance_length"]
    if method != "synthetic":
        if rates is not None or length is not None:
            name = "rates" if rates is not None else "length"
            raise ConfigError(
                f"{_P}.synthetic_acceptance_{name}",
                rates if rates is not None else length,
                "only valid with rejection_sample_method='synthetic'",
                "remove it, or set rejection_sample_method: synthetic",
            )
        return
    if (rates is None) == (length is None):
        raise ConfigError(
            f"{_P}.rejection_sample_method",
            "synthetic",
            "exactly one of synthetic_acceptance_rates and synthetic_acceptance_length",
            "remove one" if rates is not None else "set one",
            message="synthetic acceptance requires exactly one of rates and length",
        )
    if length is not None:
        # The comparison is written so that NaN fails it.
        if not 1 <= length <= k + 1:
            raise ConfigError(
                f"{_P}.synthetic_acceptance_length",
                length,
                f"a number in [1, {k + 1}] (K={k} drafts plus one)",
                f"use at most {k + 1}",
            )
        rates = rates_from_length(length, k)
        res.values["synthetic_acceptance_length"] = None
        res.values["synthetic_acceptance_rates"] = rates
        res.log.note(
            f"{_P}.synthetic_acceptance_rates",
            rates,
            "inferred",
            f"least-variance schedule of mean length {length}",
        )
    else:
        _check_rates(rates, k)
    res.log.warn(
        "rejection_sample_method='synthetic' is lossy: tokens are accepted at fixed rates, "
        "whatever the target says; use it for load tests only"
    )


def _check_rates(rates: tuple[float, ...], k: int) -> None:
    field = f"{_P}.synthetic_acceptance_rates"
    if len(rates) != k:
        raise ConfigError(
            field,
            list(rates),
            f"length {k} (num_speculative_tokens), not {len(rates)}",
            f"give {k} rates",
        )
    for rate in rates:
        if math.isnan(rate) or not 0 <= rate <= 1:
            raise ConfigError(field, list(rates), "each rate in [0, 1]", f"correct {rate}")
    for before, after in itertools.pairwise(rates):
        if after > before:
            raise ConfigError(
                field,
                list(rates),
                "non-increasing rates: accepting more drafts is rarer",
                f"{after} follows {before}; sort them in descending order",
            )


def _fly(res: Resolution, cls: type[SpeculatorConfig], k: int) -> None:
    if not cls.proposes_draft_tokens:
        raise ConfigError(
            f"{_P}.rejection_sample_method",
            "fly",
            "a method that proposes draft tokens",
            "remove rejection_sample_method",
            message=f"{cls.variant} does no speculation, so nothing can be verified",
        )
    if k < 2:
        raise ConfigError(
            f"{_P}.num_speculative_tokens",
            k,
            "at least 2 with rejection_sample_method='fly'",
            "raise num_speculative_tokens to 2 or more",
        )
    window = res.values["fly_window_size"]
    if window is None:
        window = res.values["fly_window_size"] = min(6, k - 1)
        res.log.note(f"{_P}.fly_window_size", window, "inferred", "min(6, K - 1)")
    elif window >= k:
        raise ConfigError(
            f"{_P}.fly_window_size",
            window,
            f"less than num_speculative_tokens={k}",
            f"use {k - 1} or less",
        )
    for first, last, tier in res.values["num_speculative_tokens_per_batch_size"] or ():
        if tier <= window:
            res.log.warn(
                f"FLy is inert for batches {first}-{last}: K={tier} leaves no room for its window "
                f"of {window} drafts"
            )
    res.log.warn(
        "rejection_sample_method='fly' is lossy: it may accept tokens the target would not sample"
    )


def _draft_sampling(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    values = res.values
    if values["draft_sample_method"] != "probabilistic":
        return
    if not cls.produces_draft_probabilities:
        raise ConfigError(
            f"{_P}.draft_sample_method",
            "probabilistic",
            f"'greedy' for {cls.variant}, whose drafts are one-hot",
            "remove draft_sample_method",
        )
    if values["use_local_argmax_reduction"]:
        raise ConfigError(
            f"{_P}.use_local_argmax_reduction",
            True,
            "false with draft_sample_method='probabilistic', which needs full draft logits",
            "use draft_sample_method: greedy or remove use_local_argmax_reduction",
        )


def _heterogeneous_vocab(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    values = res.values
    if values["use_heterogeneous_vocab"]:
        field = f"{_P}.use_heterogeneous_vocab"
        if not cls.draft_has_own_vocab:
            raise ConfigError(
                field, True, "only with method 'draft_model'", "remove use_heterogeneous_vocab"
            )
        if values["draft_sample_method"] != "greedy":
            raise ConfigError(
                field,
                True,
                "draft_sample_method='greedy': restricting q would break the ratio test",
                "set draft_sample_method: greedy",
            )
        if values["use_local_argmax_reduction"]:
            raise ConfigError(
                field,
                True,
                "without use_local_argmax_reduction: the token intersection needs full logits",
                "remove use_local_argmax_reduction",
            )
        return
    if cls.draft_has_own_vocab:
        check_same_vocab(res)


def _adaptive(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    values = res.values
    if not values["enable_adaptive_verification"]:
        return
    field = f"{_P}.enable_adaptive_verification"
    if not (cls.proposes_draft_tokens and cls.supports_adaptive_verification):
        raise ConfigError(
            field,
            True,
            f"a method that scores its drafts; {cls.variant} does not",
            "remove enable_adaptive_verification",
        )
    if values["use_local_argmax_reduction"] and cls.adaptive_verification_uses_draft_logits:
        raise ConfigError(
            field,
            True,
            f"without use_local_argmax_reduction for {cls.variant}: the acceptance "
            "estimate reads full draft logits",
            "remove use_local_argmax_reduction",
        )


def _dynamic_k(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    """The table is valid by now; decide whether it applies, and say so."""
    name = "num_speculative_tokens_per_batch_size"
    field = f"{_P}.{name}"
    table = res.values[name]
    if table is None:
        return
    degree = res.parallel.data_parallel_size
    if not cls.proposes_draft_tokens:
        reason = f"{cls.variant} proposes no tokens"
    elif degree > 1 and res.parallel.dynamic_k_dp_policy == "disable":
        reason = (
            f"data_parallel_size={degree}: replicas could choose different K and wait for each "
            "other forever; set dynamic_k_dp_policy: agree to keep the table"
        )
    else:
        res.log.note(field, table, "given", "K by number of scheduled requests")
        return
    res.values[name] = None
    res.log.note(field, None, "fallback", f"static K: {reason}")
    res.log.warn(f"{field} is not used: {reason}")


def _schedule(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    """Whether K follows goodput, and who decided it."""
    field = f"{_P}.num_speculative_tokens_schedule"
    wanted, degree = res.values["num_speculative_tokens_schedule"], res.parallel.data_parallel_size
    follows = "each request and step gets the drafts that pay, up to K"
    obstacle = None
    if not cls.proposes_draft_tokens:
        obstacle = f"{cls.variant} proposes no tokens"
    elif degree > 1:
        obstacle = f"data_parallel_size={degree}: replicas use the same K, and measure differently"

    def settle_on(value: str, source: Source, reason: str) -> None:
        res.values["num_speculative_tokens_schedule"] = value
        res.log.note(field, value, source, reason)

    if wanted == "constant":
        settle_on("constant", "given", "K does not follow what drafts gain and cost")
    elif obstacle is not None:
        settle_on("constant", "fallback", obstacle)
        if wanted is not None:
            res.log.warn(f"{field}={wanted!r} is not used: {obstacle}")
    elif wanted is not None:
        settle_on(wanted, "given", follows)
    elif res.values["num_speculative_tokens_per_batch_size"] is not None:
        settle_on("constant", "inferred", "the table of batch sizes decides")
    elif not res.acceptance.is_lossless:
        settle_on("constant", "inferred", "under a lossy rule the tokens depend on K")
    else:
        settle_on("goodput", "default", follows)


def _hash_settings(res: Resolution, cls: type[SpeculatorConfig]) -> None:
    if cls.needs_eagle_block_drop:
        if res.values["disable_eagle_block_drop"]:
            res.log.warn(
                "disable_eagle_block_drop is experimental: prefix hits may carry a stale tail of "
                "draft KV, which lowers acceptance"
            )
        return
    for name in ("disable_eagle_block_drop", "disable_lookahead_block_hashes"):
        if res.values[name]:
            res.log.warn(f"{name} has no effect with {cls.variant}: its draft KV is stable")


def check_resolved(res: Resolution, cls: type[SpeculatorConfig], spec: SpeculativeConfig) -> None:
    """Warnings about settings that are legal and do nothing, or less than they say."""
    owned = frozenset().union(*(load_class(c).own_options for c in CONFIG_BY_METHOD.values()))
    ignored = res.given & owned - cls.own_options
    if "method" not in res.given or res.custom_method:
        # The model's name may have named the method, and a method of others may read it.
        ignored -= {"model"}
    for name in sorted(ignored):
        res.log.warn(f"speculative_config.{name} is ignored by {cls.variant}")
    table = spec.num_speculative_tokens_per_batch_size
    for first, last, tier in table or ():
        if tier > spec.num_speculative_tokens:
            res.log.warn(
                f"dynamic K {tier} for batches {first}-{last} is clamped to "
                f"num_speculative_tokens={spec.num_speculative_tokens}"
            )
