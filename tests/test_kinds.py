"""The kinds of trouble that users of such tools have had, and the tests that hold what is right in each.

``python tests/test_kinds.py`` prints the table. A kind with no test fails, and so does a name that is none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "Input": {
        "U+2028, U+2029, U+0085, VT, FF or a lone CR inside a line": (
            "test_contract_input.py::test_lines_end_at_newlines_only_and_keep_their_physical_numbers",
            "test_intake_lines.py::test_only_a_newline_ends_a_line",
            "test_job_safety.py::test_metadata_with_a_carriage_return_between_its_members_stays_one_line",
        ),
        "BOM, CRLF, blank lines, no final newline": (
            "test_contract_input.py::test_lines_end_at_newlines_only_and_keep_their_physical_numbers",
            "test_contract_input.py::test_an_input_without_rows_is_complete_at_once_with_a_notice",
        ),
        "a locale that is not UTF-8, invalid UTF-8, lone surrogates": (
            "test_contract_input.py::test_lines_end_at_newlines_only_and_keep_their_physical_numbers",
            "test_contract_input.py::test_every_bad_line_is_named_with_a_reason_before_anything_is_sent",
        ),
        "NaN, Infinity, 1e999": (
            "test_contract_input.py::test_every_bad_line_is_named_with_a_reason_before_anything_is_sent",
        ),
        "integers beyond 2^64, long decimals, 1.0": (
            "test_contract_input.py::test_numbers_of_simple_rows_reach_the_server_digit_for_digit",
            "test_contract_input.py::test_a_batch_lines_body_travels_as_the_very_bytes_it_came_in",
        ),
        "an integer of 5,000 digits, nesting 1,000 deep, a line of 20 MB": (
            "test_contract_input.py::test_monstrous_lines_are_contained_each_to_its_row",
            "test_job_safety.py::test_a_line_beyond_all_bounds_is_one_failed_row_and_the_rest_runs",
        ),
        'duplicate ids, also 1 and "1"; long and odd ids': (
            "test_contract_input.py::test_duplicate_ids_are_named_with_both_lines",
            "test_contract_input.py::test_odd_ids_come_back_as_they_were_and_are_never_paths",
        ),
        "no body or method, unknown urls, urls with a host, several endpoints or models": (
            "test_contract_input.py::test_every_bad_line_is_named_with_a_reason_before_anything_is_sent",
            "test_contract_bounds.py::test_a_rows_url_is_one_of_a_few_paths_or_a_bad_line",
            "test_contract_input.py::test_several_models_in_one_file_are_fine",
            "test_contract_input.py::test_every_openai_row_shape_is_asked_and_answered_under_its_own_id",
        ),
        "gzip bomb, truncated gzip": (
            "test_contract_input.py::test_a_gzip_bomb_is_contained",
            "test_contract_input.py::test_stdin_needs_a_job_and_broken_archives_are_refused",
        ),
        "a producer that is slow, floods, stops in mid-line, or repeats itself; a bad line in mid-stream": (
            "test_streams.py::test_answers_come_while_the_producer_still_writes",
            "test_streams.py::test_with_a_stuck_server_no_more_is_read_than_may_wait",
            "test_streams.py::test_a_signal_ends_the_wait_for_stdin_and_the_job_can_be_resumed",
            "test_streams.py::test_a_stream_given_again_is_compared_and_goes_on_behind_what_the_job_knows",
            "test_streams.py::test_a_bad_line_stops_the_stream_and_nothing_that_was_read_is_lost",
        ),
        "input changed, truncated or appended between runs": (
            "test_contract_input.py::test_a_changed_or_truncated_input_is_refused_with_the_line_that_differs",
            "test_contract_input.py::test_appended_rows_are_picked_up_and_the_others_are_not_asked_again",
            "test_contract_input.py::test_an_appended_duplicate_or_bad_line_is_refused_with_its_number",
        ),
    },
    "Tokens and packing": {
        "special tokens in a prompt": (
            "test_contract_bounds.py::test_what_is_odd_to_count_is_counted_in_bounded_time",
            "test_intake_tokens.py::test_special_tokens_are_ordinary_text",
        ),
        "a million repeated characters, a tokenizer that panics": (
            "test_contract_bounds.py::test_what_is_odd_to_count_is_counted_in_bounded_time",
            "test_intake_tokens.py::test_a_tokenizer_that_panics_falls_back_to_an_estimate_that_says_so",
        ),
        "no network for vocabularies, unknown model": (
            "test_contract_bounds.py::test_an_unknown_models_tokens_are_counted_offline_with_one_notice",
            "test_intake_tokens.py::test_counting_needs_no_network_and_writes_no_cache",
        ),
        "images, audio and files as base64": (
            "test_contract_bounds.py::test_what_is_odd_to_count_is_counted_in_bounded_time",
            "test_intake_tokens.py::test_media_are_counted_by_their_constant_and_never_as_text",
        ),
        "tools, schemas, system prompts, several messages": (
            "test_contract_bounds.py::test_what_is_odd_to_count_is_counted_in_bounded_time",
            "test_intake_tokens.py::test_tools_and_schemas_are_counted_too",
        ),
        "a row larger than the token bucket or the batch budget": (
            "test_contract_bounds.py::test_a_row_larger_than_every_budget_is_sent_alone_and_waits_for_no_impossible_bucket",
            "test_plan_pack.py::test_a_row_over_the_budget_travels_alone",
        ),
        "the provider finds a single row too large": (
            "test_contract_rate_limits.py::test_what_asking_again_cannot_mend_is_asked_once",
        ),
        "the provider finds a batch too large": (
            "test_packed.py::test_a_batch_that_is_too_large_is_halved_and_a_row_that_is_fails_alone",
        ),
        "one bad row fails the whole packed call": (
            "test_packed.py::test_one_poisoned_row_fails_alone_with_few_extra_calls",
            "test_plan_schedule.py::test_a_packed_call_that_always_fails_is_halved_until_only_the_row_at_fault_is_left",
        ),
        "answers out of order, missing, extra, duplicated": (
            "test_packed.py::test_a_row_that_the_reply_leaves_out_is_asked_again_alone",
            "test_packed.py::test_texts_to_embed_share_calls_and_every_vector_is_at_its_own_id",
        ),
    },
    "HTTP": {
        "a pool smaller than the concurrency, the limit on open files": (
            "test_contract_bounds.py::test_a_limit_on_open_files_lowers_the_concurrency_with_a_notice",
            "test_contract_rate_limits.py::test_in_flight_is_never_above_the_ceiling",
        ),
        "a reply that drips, a silent socket": (
            "test_contract_rate_limits.py::test_every_way_to_lose_a_reply_is_asked_again_once",
            "test_contract_exit_codes.py::test_a_port_that_accepts_and_says_nothing_is_no_rows_failure_before_its_attempts_are_used",
        ),
        "reset before or after the request was written, short body, stale keep-alive": (
            "test_contract_rate_limits.py::test_every_way_to_lose_a_reply_is_asked_again_once",
            "test_contract_rate_limits.py::test_resets_on_accept_use_up_no_attempts_where_nothing_was_read",
            "test_contract_rate_limits.py::test_kept_connections_that_went_stale_cost_no_row",
        ),
        "HTML error pages, empty and endless bodies, gzip bombs, deep JSON": (
            "test_contract_bounds.py::test_no_body_whatever_its_size_or_depth_costs_more_than_its_own_attempt",
            "test_contract_results.py::test_a_200_that_is_no_answer_is_asked_again",
        ),
        "redirects": (
            "test_contract_exit_codes.py::test_78_a_redirect_is_named_and_never_followed",
            "test_transport_proxy.py::test_a_redirect_is_not_followed_and_no_cookie_is_kept_behind_a_proxy",
        ),
        "TLS: wrong host, unknown authority, expired": (
            "test_contract_exit_codes.py::test_69_an_unknown_certificate_is_refused_at_once_and_the_key_is_never_sent",
            "test_transport_tls.py::test_a_certificate_for_another_host_is_refused_before_the_key_is_sent",
            "test_transport_tls.py::test_a_certificate_that_expired_is_refused_before_the_key_is_sent",
        ),
        "proxies from the environment": (
            "test_contract_security.py::test_the_key_goes_to_no_proxy_and_no_other_host",
            "test_transport_proxy.py::test_a_run_goes_through_the_proxy_of_the_environment_only_when_told_to",
        ),
        "DNS failure, refused, unreachable for minutes": (
            "test_contract_rate_limits.py::test_an_outage_fails_no_row_and_is_not_hammered",
            "test_contract_exit_codes.py::test_69_an_endpoint_that_stays_unreachable_stops_the_run_and_fails_no_row",
            "test_contract_exit_codes.py::test_69_a_host_that_does_not_exist_fails_no_row",
        ),
    },
    "Rate limits and retries": {
        "Retry-After in every spelling, an hour, nonsense": (
            "test_contract_rate_limits.py::test_the_hints_of_a_refusal_are_kept_to_and_nonsense_is_ignored",
            "test_contract_rate_limits.py::test_an_hour_long_hint_is_not_sent_into_and_fails_no_row",
            "test_providers_headers.py::test_retry_after_is_read_in_all_its_spellings_and_nonsense_is_ignored",
        ),
        "hints elsewhere: retryDelay, reset headers in all units, -1": (
            "test_providers_faults.py::test_gemini_errors_natively_and_as_the_compatible_endpoints_array",
            "test_providers_headers.py::test_openai_quotas_are_read_with_resets_in_seconds",
            "test_providers_headers.py::test_of_anthropic_token_quotas_the_tightest_counts_with_its_rfc_3339_reset",
            "test_providers_headers.py::test_a_quota_of_minus_one_is_no_quota",
        ),
        "a 429 that is no rate limit": (
            "test_contract_exit_codes.py::test_77_78_a_fatal_reply_stops_the_run_and_leaves_every_row_pending",
            "test_contract_rate_limits.py::test_what_asking_again_cannot_mend_is_asked_once",
        ),
        "401, 403, unknown model, credit balance": (
            "test_contract_exit_codes.py::test_77_78_a_fatal_reply_stops_the_run_and_leaves_every_row_pending",
        ),
        "a 400 of the content filter or the context length": (
            "test_contract_rate_limits.py::test_what_asking_again_cannot_mend_is_asked_once",
            "test_contract_results.py::test_a_result_and_a_failure_hold_what_the_contract_shows",
        ),
        "529, 503, 498, errors inside a 200, one-element arrays, codes as strings": (
            "test_contract_rate_limits.py::test_refusals_never_use_up_a_rows_attempts",
            "test_contract_results.py::test_an_error_inside_a_200_or_an_array_is_recognised",
            "test_providers_faults.py::test_every_shape_of_error_body_is_read",
        ),
        "100 requests refused at once": (
            "test_plan_limit.py::test_a_cohort_of_a_hundred_refusals_makes_one_cut",
            "test_contract_rate_limits.py::test_a_limit_of_requests_in_flight_is_found_and_no_row_fails_by_it",
        ),
        "a hint longer than the cool-down, again and again": (
            "test_plan_limit.py::test_repeated_long_hints_never_freeze_the_limit_and_never_collapse_it",
        ),
        "a row that always fails": (
            "test_contract_rate_limits.py::test_a_row_that_always_fails_is_sent_exactly_max_attempts_times",
        ),
        "the herd after a pause": (
            "test_plan_schedule.py::test_a_scope_is_spared_a_herd_after_a_pause",
            "test_plan_limit.py::test_an_outage_is_followed_by_a_quarter_of_the_window_and_doublings",
        ),
    },
    "Responses and money": {
        "finish reasons, refusals, empty content, only reasoning": (
            "test_contract_results.py::test_a_paid_answer_is_kept_whatever_its_finish",
            "test_contract_results.py::test_an_incomplete_response_is_kept_with_its_reason",
        ),
        "usage missing or null; cached and reasoning tokens inside or beside the totals": (
            "test_contract_results.py::test_unknown_usage_stays_unknown_and_is_counted",
            "test_providers_openai.py::test_usage_is_normalised_and_unknown_stays_unknown",
            "test_providers_anthropic.py::test_input_tokens_stand_beside_the_cached_ones_and_are_added_up",
            "test_providers_gemini.py::test_usage_is_normalised_and_unknown_stays_unknown",
        ),
        "prices: unknown, of batches, tiers, caches and long contexts": (
            "test_contract_results.py::test_an_unpriced_models_rows_cost_null_and_are_counted",
            "test_contract_money.py::test_costs_are_exact_to_the_last_digit",
            "test_report_prices.py::test_a_tier_that_is_listed_is_priced_as_listed",
            "test_report_prices.py::test_the_worst_case_jumps_with_the_long_context_tier",
        ),
        "50 in flight at the cap": (
            "test_contract_money.py::test_a_budget_under_fifty_in_flight_is_never_exceeded_as_billed_by_the_server",
        ),
    },
    "Job, cron, terminal": {
        "kill -9 anywhere": (
            "test_contract_crashes.py::test_ten_kills_of_two_thousand_rows_lose_and_double_nothing",
            "faults/test_crashes.py::test_a_run_broken_anywhere_is_resumed_and_each_row_is_answered_once",
            "faults/test_crashes.py::test_kills_at_any_moment_lose_nothing_double_nothing_and_stay_within_the_cap",
        ),
        "power loss, fsync errors": (
            "faults/test_power.py::test_power_cuts_lose_no_row_that_was_shown_as_done",
            "faults/test_storage.py::test_from_the_nth_call_on_that_the_disk_fails_nothing_more_is_sent",
        ),
        "out of memory": ("faults/test_storage.py::test_a_run_that_the_kernel_kills_for_its_memory_loses_nothing",),
        "disk full": (
            "faults/test_storage.py::test_a_disk_that_fills_up_while_replies_are_kept_stops_the_run",
            "faults/test_storage.py::test_a_disk_too_full_for_the_results_file_keeps_every_answer",
            "test_contract_exit_codes.py::test_74_after_a_failed_commit_nothing_more_is_sent",
        ),
        "read-only remount": (
            "faults/test_storage.py::test_a_disk_that_turns_read_only_stops_the_run_and_can_still_be_read",
            "test_job_safety.py::test_the_job_of_a_read_only_directory_can_be_read",
        ),
        "two runs; a lock left by a dead run; a child that holds it": (
            "test_contract_exit_codes.py::test_75_a_second_run_on_the_same_job_leaves_at_once",
            "test_contract_exit_codes.py::test_75_a_lock_left_by_a_dead_run_holds_nobody_up",
            "test_contract_bounds.py::test_a_child_of_a_dead_run_holds_its_lock_no_longer",
        ),
        "cron: bare environment, other directory, no terminal, umask 000, no HOME": (
            "test_contract_terminal.py::test_cron_with_a_bare_environment_another_directory_and_umask_000",
            "test_contract_terminal.py::test_the_recipe_for_cron_mails_only_on_trouble_and_goes_on_the_next_night",
            "test_contract_terminal.py::test_files_written_by_output_are_private_whatever_the_umask",
        ),
        "stdout closed, SIGHUP": (
            "test_contract_terminal.py::test_a_closed_stdout_is_no_traceback_and_loses_nothing",
            "test_contract_terminal.py::test_a_run_whose_output_is_closed_still_runs_to_its_end",
            "test_contract_exit_codes.py::test_129_130_143_one_signal_drains_and_the_job_goes_on_later",
        ),
        "wall clock steps, machine suspended": (
            "test_contract_bounds.py::test_a_wall_clock_that_steps_back_and_forth_changes_nothing",
            "test_contract_crashes.py::test_a_process_that_slept_longer_than_its_timeouts_keeps_the_answers_that_came",
        ),
        "hostile model output: ANSI, OSC, markup, HTML, formulas, bidi controls": (
            "test_contract_security.py::test_hostile_model_text_is_inert_in_terminal_and_reports",
            "test_contract_security.py::test_results_on_a_terminal_are_inert_and_say_the_same",
            "test_report_render.py::test_hostile_text_is_inert_in_html",
        ),
        "a million rows": (
            "test_contract_bounds.py::test_a_hundred_times_as_many_rows_take_hardly_more_memory_and_soon_send",
            "test_run_engine.py::test_every_row_is_answered_once_within_the_limit_and_with_no_more_tasks_than_calls",
        ),
    },
}
"""Section → kind → the tests that cover it, as pytest names them below ``tests/``."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Returns the names of a file's tests; none where there is no such file."""
    if not path.is_file():
        return frozenset()
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def exists(node_id: str) -> bool:
    """Returns whether ``file.py::test_name`` is a test."""
    file, _, name = node_id.partition("::")
    return name in names_in(TESTS / file)


@pytest.mark.parametrize(("section", "kind"), [(section, kind) for section, kinds in KINDS.items() for kind in kinds])
def test_every_kind_has_tests_and_each_of_them_exists(section: str, kind: str) -> None:
    covered = KINDS[section][kind]
    assert covered
    assert [node_id for node_id in covered if not exists(node_id)] == []


def table() -> Iterator[str]:
    """Yields the table's lines."""
    for section, kinds in KINDS.items():
        yield f"\n{section}\n"
        for kind, node_ids in kinds.items():
            yield f"  {kind}"
            yield from (f"      {node_id}" for node_id in node_ids)


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()).lstrip() + "\n")
