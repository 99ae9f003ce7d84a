"""Programs that libeclip once harmed: each is right by itself, and must be right under libeclip."""

from __future__ import annotations

import pytest

from native_build import Native

# By what they show, in native/testing/cases_*.cpp.
UNKNOWN = [
    "unknown_call_linked",
    "unknown_call_by_dlsym",
    "unknown_call_by_version",
    "unknown_call_that_is_only_looked_for",
    "unknown_call_after_work_on_other_streams",
    "unknown_call_in_the_default_stream",
    "unknown_call_with_many_arguments",
    "newer_interface_of_a_known_name",
]
CASES = [
    "late_copy_of_a_blocking_stream",
    "late_copy_of_a_shared_stream",
    "late_copy_of_the_default_stream",
    "late_copy_of_a_stream_that_is_waited_for",
    "late_copy_of_a_stream_that_was_waited_for",
    "copy_that_waits_for_another_thread",
    "copy_in_the_default_stream_that_waits_for_another_thread",
    "threads_on_one_stream",
    "threads_that_meet_on_one_stream",
    "late_copy_of_the_default_stream_before_blocking_ones",
    "late_copy_on_a_lane_that_was_left",
    "late_copy_on_a_lane_that_was_taken_over",
    "late_copy_that_was_waited_for_before_the_default_stream",
    "launch_on_a_lane_that_was_just_waited_for",
    "lane_that_was_waited_for_serves_another_stream",
    "lane_that_a_non_blocking_stream_took_over",
    "lane_that_a_non_blocking_stream_took_over_after_a_copy",
    "lane_that_is_taken_while_another_is_asked_for",
    "event_of_a_context",
    "recording_of_a_new_stream_while_another_is_captured",
    "recording_of_many_launches_while_a_blocking_stream_is_captured",
    "recording_of_a_stream_that_waits_for_the_host",
    "lane_that_refuses",
    "launch_that_is_wrong",
    "launch_whose_attributes_are_missing",
    "function_that_the_driver_lacks",
    "update_that_is_refused_names_my_node",
    "private_contexts_in_turn",
    "recording_without_lanes",
    "priorities_of_lanes",
    "names_are_asked_for_once",
    "shapes_without_end",
    "deeply_bound_library",
    "older_interface_of_a_known_name",
    "disabled_node_stays_disabled",
    "update_of_the_executable_alone_stays",
    "update_while_the_device_waits_for_the_host",
    "update_while_another_stream_is_captured",
    "launch_after_an_update_follows_the_one_before",
    "kernel_longer_than_the_grain_is_a_stretch_by_itself",
    "pause_of_the_program_does_not_lengthen_its_kernels",
    "kernels_of_a_size_that_is_new_are_few_in_a_stretch",
    "graph_of_background_is_cut",
    "graph_that_takes_long_is_cut_once_that_is_known",
    "updates_reach_the_parts_of_a_graph",
    "launches_in_parts_follow_each_other",
    "graph_kept_whole_follows_its_parts",
    "recorded_graph_kept_whole_follows_its_parts",
    "graph_with_a_disabled_node_is_cut_later",
    "recorded_graph_is_cut_again_after_an_update",
    "update_inside_a_replaced_child_is_not_lost",
    "update_by_a_graph_of_another_nesting_is_refused",
    "graph_is_not_cut_at_a_programmatic_edge",
    "graph_that_records_an_event_is_not_cut",
    "graph_on_a_stream_of_two_threads_is_not_cut",
    "child_graphs_are_cut",
    "kernels_of_child_graphs_are_placed",
    "child_graph_that_is_replaced_keeps_its_lanes",
    "wait_for_an_event_ends_its_stream",
    "event_that_is_found_done_ends_its_stream",
    "new_event_with_an_old_handle_ends_nothing",
    "event_that_is_recorded_again_ends_the_other_stream",
    "priority_of_a_lane_of_the_whole_device",
    "updated_node_stays_on_its_lane",
    "graph_with_a_function_of_a_module",
    "graph_of_another_device",
    "graph_of_a_private_context",
    "peer_copy_from_another_device",
    "work_after_a_peer_copy",
    "other_device_is_waited_for",
    "memory_of_the_other_device_is_freed",
    "memory_of_the_planned_device_is_freed",
    "handle_of_another_contexts_stream_that_was_destroyed",
    "handle_of_a_stream_that_went_with_its_context",
    "call_before_the_planned_context_is_used",
    "call_while_another_context_is_current",
    "cap_holds_for_streams_of_all_kinds",
    "cap_that_is_no_multiple_of_slices_is_rounded_down",
    "cap_as_a_share_of_the_device",
    "cap_that_changes",
    "graph_under_a_cap_keeps_updates_when_it_moves",
    "cap_holds_for_more_streams_than_lanes",
    "kernel_that_does_not_fit_under_the_cap",
    "cap_that_nobody_can_have",
    "capture_begun_while_the_default_stream_is_on_a_lane",
    "capture_begun_while_another_context_is_current",
    *UNKNOWN,
]


@pytest.mark.parametrize("case", CASES)
def test_the_program_is_right_by_itself(native: Native, case: str) -> None:
    done = native.run("plain/cases", case)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_the_program_is_right_under_libeclip(native: Native, case: str) -> None:
    done = native.run("plain/cases", case, preload=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if case in UNKNOWN:
        (said,) = done.stderr.splitlines()
        assert said.startswith("eclip: the program calls cu")
        assert said.endswith("running unplanned from here on")


# For the library that watches launches.
WATCHED = "launches_that_another_library_watches"


@pytest.mark.parametrize("finds", ["next", "library", "version"])
def test_a_library_preloaded_beside_libeclip_sees_the_calls(native: Native, finds: str) -> None:
    watcher = native.library.with_name("libwatcher.so")
    for preloaded in (watcher, f"{native.library}:{watcher}", f"{watcher}:{native.library}"):
        done = native.run("plain/cases", WATCHED, LD_PRELOAD=str(preloaded), WATCHER_FINDS=finds)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_case_is_run(native: Native) -> None:
    listed = native.run("plain/cases", "--list").stdout.split()
    assert sorted(listed) == sorted([*CASES, WATCHED])
