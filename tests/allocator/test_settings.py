"""The allocator's settings are read as PyTorch reads them, and sizes follow from them as PyTorch makes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.allocator.errors import SettingsError
from allocscope.allocator.settings import (
    MIB,
    AllocatorSettings,
    as_read,
    parse_settings,
    parse_settings_to_try,
    settings_of_snapshot,
)

PLAIN = AllocatorSettings()


@pytest.mark.parametrize(
    ("asked", "rounded"),
    [
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (1000, 1024),
        (MIB, MIB),
        (MIB + 1, MIB + 512),
        (31457281, 31457792),
    ],
)
def test_requests_are_rounded_to_512_bytes(asked, rounded):
    assert PLAIN.round(asked) == rounded


@pytest.mark.parametrize(
    ("conf", "asked", "rounded"),
    [
        pytest.param("roundup_power2_divisions:4", 1200, 1536, id="too small for four steps of 512"),
        pytest.param("roundup_power2_divisions:4", 3000, 3072, id="between 2048 and 4096 in steps of 512"),
        pytest.param("roundup_power2_divisions:4", 5 * MIB + 1, 6 * MIB, id="a quarter of four MiB"),
        pytest.param("roundup_power2_divisions:4", 8 * MIB, 8 * MIB, id="a power of two stays"),
        pytest.param("roundup_power2_divisions:1", 5 * MIB + 1, 5 * MIB + 512, id="one step means plain rounding"),
        pytest.param(
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 300 * MIB, 300 * MIB, id="the first up to 512 MiB"
        ),
        pytest.param(
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 600 * MIB, 768 * MIB, id="halves from 512 MiB"
        ),
        pytest.param(
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 1100 * MIB, 1280 * MIB, id="quarters from 1 GiB"
        ),
        pytest.param(
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 2049 * MIB, 2304 * MIB, id="eighths from 2 GiB"
        ),
    ],
)
def test_requests_are_rounded_in_steps_of_their_octave(conf, asked, rounded):
    assert parse_settings(conf).round(asked) == rounded


def test_a_list_of_divisions_sets_only_what_it_names():
    """PyTorch leaves what lies between two entries at plain rounding (ALLOCATOR.md 9)."""
    settings = parse_settings("roundup_power2_divisions:[64:8,256:4,1024:4,>:1]")
    assert settings.divisions == (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("conf", "divisions"),
    [
        ("[>:8]", (0, *(8,) * 15)),
        ("[64:8,]", (*(8,) * 7, *(0,) * 9)),
        ("[]", (0,) * 16),
        ("[64:0,>:4]", (*(0,) * 7, *(4,) * 9)),
        ("[>:8,64:2]", (*(2,) * 7, *(8,) * 9)),
        ("[64:8,>:4,128:2]", (*(8,) * 7, 2, *(4,) * 8)),
        ("4,roundup_power2_divisions:[64:8]", (*(8,) * 7, *(4,) * 9)),
    ],
)
def test_odd_lists_of_divisions_are_read_as_pytorch_reads_them(conf, divisions):
    """As 2.14.1 tells them in its snapshot's allocator_settings."""
    assert parse_settings(f"roundup_power2_divisions:{conf}").divisions == divisions


@pytest.mark.parametrize(
    ("conf", "settings"),
    [
        ("max_split_size_mb:64.5", AllocatorSettings(max_split_bytes=64 * MIB)),
        ("max_split_size_mb:64MB", AllocatorSettings(max_split_bytes=64 * MIB)),
        ("max_split_size_mb:+64", AllocatorSettings(max_split_bytes=64 * MIB)),
        ("max_split_size_mb:-1", AllocatorSettings()),
        ("garbage_collection_threshold:0.5x", AllocatorSettings(gc_threshold=0.5)),
    ],
)
def test_numbers_are_read_up_to_where_they_end_as_pytorch_does_and_are_not_tried(conf, settings):
    """A job that runs with such a string runs with these."""
    assert parse_settings(conf) == settings
    with pytest.raises(SettingsError, match="cannot be"):
        parse_settings_to_try(conf)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("max_split_size_mb", "64", "64"),
        ("max_split_size_mb", "64.5", "64"),
        ("pinned_max_cached_size_mb", "-1", "18446744073709551615"),
        ("garbage_collection_threshold", "0.5x", "0.5"),
        ("expandable_segments", "True", "True"),
        ("max_split_size_mb", "many", "many"),
    ],
)
def test_a_value_as_pytorch_takes_it(key, value, read):
    assert as_read(key, value) == read


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (31457792, 32 * MIB),
    ],
)
def test_a_request_asks_the_driver_for_a_segment(rounded, segment):
    assert PLAIN.segment_bytes(rounded) == segment


def test_every_size_setting_is_read():
    settings = parse_settings(
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:40,large_segment_size_mb:32,"
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5,backend:native,pinned_num_register_threads:8"
    )
    assert settings == AllocatorSettings(
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        expandable=True,
        large_segment_bytes=32 * MIB,
        gc_threshold=0.8,
        memory_fraction=0.5,
    )


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("max_split_size_mb:many", "max_split_size_mb cannot be 'many': it is a whole number of MiB"),
        ("max_split_size_mb:99999999999999999999", "max_split_size_mb cannot be '99999999999999999999'"),
        ("max_split_size_mb:0", "max_split_size_mb cannot be '0'"),
        (
            "max_split_size_mb:64 expandable_segments:True",
            "cannot be read from 'max_split_size_mb:64expandable_segments",
        ),
        ("per_process_memory_fraction:-inf", "per_process_memory_fraction cannot be '-inf'"),
        ("per_process_memory_fraction:-0.5", "per_process_memory_fraction cannot be '-0.5'"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold cannot be 'nan': it is a share from 0 to 1"),
        ("roundup_power2_divisions:-4", "roundup_power2_divisions cannot be '-4'"),
        ("expandable_segments:yes", "expandable_segments cannot be 'yes': it is True or False, written so"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions cannot be '3': it is a power of two, such as 8, or "),
        ("roundup_power2_divisions:0", "roundup_power2_divisions cannot be '0'"),
        ("roundup_power2_divisions:[63:8]", r"roundup_power2_divisions cannot be '\[63:8\]'"),
        ("roundup_power2_divisions:[0:2,>:4]", r"roundup_power2_divisions cannot be '\[0:2,>:4\]'"),
        ("roundup_power2_divisions:[64]", r"roundup_power2_divisions cannot be '\[64\]'"),
        ("roundup_power2_divisions:[64:8;128:4]", r"roundup_power2_divisions cannot be '\[64:8;128:4\]'"),
        ("max_split_size_mb", "cannot be read from 'max_split_size_mb' on"),
        ("expandable_segments:True,,", "cannot be read from ',' on: it is KEY:VALUE,KEY:VALUE"),
    ],
)
def test_settings_that_pytorch_would_refuse_are_refused(conf, message):
    with pytest.raises(SettingsError, match=message) as caught:
        parse_settings(conf)
    assert caught.value.conf == conf


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("large_segment_size_mb:10", "large_segment_size_mb must be more than 10"),
        ("large_segment_size_mb:1", "large_segment_size_mb must be more than 10"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb must be at least 20"),
        ("max_non_split_rounding_mb:31,large_segment_size_mb:32", "max_non_split_rounding_mb must be at least 32"),
        ("max_split_size_mb:19", "max_split_size_mb must be at least 20"),
        (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "give the value alone, without PYTORCH_CUDA_ALLOC_CONF=",
        ),
        ("export PYTORCH_ALLOC_CONF=", "give the value alone, without export PYTORCH_ALLOC_CONF="),
        ("pinned_num_register_threads:3", "pinned_num_register_threads cannot be '3': it is a power of two up to 128"),
        ("pinned_num_register_threads:256", "pinned_num_register_threads cannot be '256'"),
        (
            "pinned_reserve_segment_size_mb:0",
            "pinned_reserve_segment_size_mb cannot be '0': it is a whole number of MiB",
        ),
        ("pinned_max_cached_size_mb:many", "pinned_max_cached_size_mb cannot be 'many': it is a whole number of MiB"),
        ("pinned_use_background_threads:true", "pinned_use_background_threads cannot be 'true': it is True or False"),
        ("release_lock_on_cudamalloc:1", "release_lock_on_cudamalloc cannot be '1': it is True or False"),
    ],
)
def test_values_that_pytorch_would_refuse_are_not_tried(conf, message):
    with pytest.raises(SettingsError, match=message) as caught:
        parse_settings_to_try(conf)
    assert caught.value.conf == conf


def test_the_least_sizes_that_pytorch_takes_are_tried():
    conf = "large_segment_size_mb:11,max_non_split_rounding_mb:11,max_split_size_mb:11"
    settings = parse_settings_to_try(conf)
    assert settings.large_segment_bytes == settings.non_split_rounding_bytes == settings.max_split_bytes == 11 * MIB


def test_a_snapshot_tells_settings_by_string_and_by_key():
    told = {
        "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:32",
        "max_split_size": 64 * MIB,
        "expandable_segments": True,
        "roundup_power2_divisions": {"1": 0, "2": 4, "32768": 8},
    }
    settings = settings_of_snapshot(told)
    assert (settings.large_segment_bytes, settings.max_split_bytes, settings.expandable) == (32 * MIB, 64 * MIB, True)
    assert settings.divisions == (0, 4) + (0,) * 13 + (8,)


@given(
    size=st.integers(1, 1 << 36),
    divisions=st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=16, max_size=16).map(tuple),
)
def test_floor_is_the_largest_request_that_fits_a_block(size, divisions):
    settings = AllocatorSettings(divisions=divisions)
    largest = settings.floor(size)
    assert largest <= size
    assert largest == 0 or settings.round(largest) <= size
    assert settings.round(largest + 1) > size
