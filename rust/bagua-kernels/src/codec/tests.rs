//! The contract of all codecs. To add a codec, put its name in `NAMES`, an entry in `sets`, and lines in `golden.txt`.

use half::{bf16, f16};
use proptest::prelude::*;

use super::simd::Level;
use super::*;

/// Returns every codec, with options that make a difference.
pub(super) fn sets() -> Vec<Arc<dyn Codec>> {
    use CodecOption::{Float, Int};
    let given: [(&str, &[(&str, CodecOption)]); 17] = [
        ("minmax_u8", &[]),
        ("f16", &[]),
        ("bf16", &[]),
        ("block_i8", &[]),
        ("block_i8", &[("block", Int(1))]),
        ("block_i8", &[("block", Int(19))]),
        ("top_k", &[]),
        ("top_k", &[("k", Float(0.3))]),
        ("top_k", &[("k", Float(1.0))]),
        ("random_k", &[]),
        ("random_k", &[("k", Float(0.3)), ("seed", Int(7))]),
        ("random_k", &[("k", Float(1.0))]),
        ("onebit", &[]),
        ("int4", &[]),
        ("top_k", &[("k", Int(64)), ("chunk", Int(4096)), ("bits", Int(2))]),
        ("top_k", &[("k", Float(0.2)), ("chunk", Int(97))]),
        ("top_k", &[("k", Int(3)), ("chunk", Int(2))]),
    ];
    given.iter().map(|(name, options)| make(name, options).unwrap()).collect()
}

pub(super) fn make(name: &str, options: &[(&str, CodecOption)]) -> Result<Arc<dyn Codec>> {
    let options: Vec<_> = options.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    by_name(name, &options)
}

pub(super) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Converts values to elements of a type.
pub(super) fn elements(dtype: DType, values: &[f32]) -> Vec<u8> {
    let element = |x: &f32| match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        _ => bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(element).collect()
}

/// Converts elements of a type to values.
pub(super) fn values(dtype: DType, elements: &[u8]) -> Vec<f32> {
    let value = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
        _ => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
    };
    elements.chunks_exact(dtype.size()).map(value).collect()
}

/// Returns the record of some elements, written to memory that held other bytes before.
fn record_of(codec: &dyn Codec, dtype: DType, elements: &[u8], draw: u64) -> (Vec<u8>, Encoded) {
    let mut record = vec![0xa5; codec.record_len(elements.len() / dtype.size(), dtype)];
    let encoded = codec.encode(dtype, elements, &mut record, draw, &mut Scratch::default());
    (record, encoded)
}

fn decoded(codec: &dyn Codec, dtype: DType, record: &[u8], count: usize) -> Result<Vec<f32>> {
    let mut elements = vec![0xa5; count * dtype.size()];
    codec.decode(dtype, record, &mut elements)?;
    Ok(values(dtype, &elements))
}

fn there_and_back(codec: &dyn Codec, dtype: DType, given: &[f32]) -> (Vec<f32>, Encoded) {
    let (record, encoded) = record_of(codec, dtype, &elements(dtype, given), 0);
    (decoded(codec, dtype, &record, given.len()).unwrap(), encoded)
}

/// Returns ordinary gradients: between -1 and 1, most of them small.
fn ordinary(dtype: DType, count: usize) -> Vec<f32> {
    let cube = |i: usize| ((i * 7919 % 2003) as f32 / 1001.0 - 1.0).powi(3);
    values(dtype, &elements(dtype, &(0..count).map(cube).collect::<Vec<_>>()))
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn records_have_the_bytes_of_the_golden_file() {
    let mut seen = Vec::new();
    for line in include_str!("golden.txt").lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('|').collect();
        let [name, options, dtype, call, elements, record] = fields[..] else { panic!("{line}") };
        let option = |text: &str| -> (String, CodecOption) {
            let (name, value) = text.split_once('=').unwrap();
            let float = || CodecOption::Float(value.parse().unwrap());
            (name.to_owned(), value.parse().map_or_else(|_| float(), CodecOption::Int))
        };
        let given: Vec<_> = options.split(',').filter(|text| !text.is_empty()).map(option).collect();
        let codec = by_name(name, &given).unwrap();
        assert_eq!(codec.options(), options);
        let dtype = DTYPES.into_iter().find(|each| each.name() == dtype).unwrap();
        let (elements, record) = (from_hex(elements), from_hex(record));
        let draw = chunks::draw(call.parse().unwrap(), 0);
        assert_eq!(record_of(&*codec, dtype, &elements, draw).0, record, "{line}");
        let mut back = vec![0xa5; elements.len()];
        codec.decode(dtype, &record, &mut back).unwrap();
        seen.push((name.to_owned(), dtype));
    }
    for name in NAMES {
        for dtype in DTYPES {
            assert!(seen.contains(&(name.to_owned(), dtype)), "no golden record of {name} for {}", dtype.name());
        }
    }
}

#[test]
fn ids_and_names_are_unique_and_no_id_is_zero() {
    let codecs: Vec<_> = NAMES.iter().map(|name| make(name, &[]).unwrap()).collect();
    assert_eq!(codecs.iter().map(|codec| codec.id()).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(codecs.iter().map(|codec| codec.name()).collect::<Vec<_>>(), NAMES);
    assert_eq!(make("MinMaxUInt8", &[]).unwrap().name(), "minmax_u8");
}

#[test]
fn names_and_options_that_do_not_exist_are_refused() {
    use CodecOption::{Float, Int};
    let invalid = |name, options: &[(&str, CodecOption)]| match make(name, options) {
        Err(Error::InvalidArgument(text)) => text,
        other => panic!("{name}: {other:?}"),
    };
    let text = invalid("zip", &[]);
    assert!(NAMES.iter().all(|name| text.contains(name)), "{text}");
    for name in ["top_k", "random_k"] {
        for k in [Int(0), Int(-1), Float(0.0), Float(-0.5), Float(1.01), Float(f64::NAN), Float(f64::INFINITY)] {
            invalid(name, &[("k", k)]);
        }
    }
    for option in [("chunk", Int(0)), ("chunk", Int(4097)), ("bits", Int(1)), ("bits", Int(4))] {
        invalid("top_k", &[option]);
    }
    invalid("block_i8", &[("block", Int(0))]);
    invalid("random_k", &[("seed", Int(-1))]);
    for (name, option) in [
        ("minmax_u8", ("k", Float(0.5))),
        ("f16", ("block", Int(1))),
        ("top_k", ("seed", Int(1))),
        ("top_k", ("chunk", Float(8.0))),
        ("int4", ("block", Int(64))),
        ("block_i8", ("block", Float(2.0))),
        ("random_k", ("seed", Float(1.0))),
    ] {
        assert!(matches!(make(name, &[option]), Err(Error::UnsupportedType(_))), "{name} {option:?}");
    }
}

#[test]
fn other_element_types_are_refused() {
    for codec in sets() {
        for dtype in DType::ALL {
            let refused = matches!(codec.check(dtype), Err(Error::UnsupportedType(_)));
            assert_eq!(refused, !DTYPES.contains(&dtype), "{codec:?} {}", dtype.name());
        }
    }
}

#[test]
fn a_number_to_keep_above_the_elements_keeps_all_of_them() {
    for name in ["top_k", "random_k"] {
        let codec = make(name, &[("k", CodecOption::Int(5))]).unwrap();
        assert_eq!(codec.record_len(0, DType::F32), 0);
        let elements: Vec<u8> = [3.0_f32, -1.0, 0.5, 8.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        codec.check_count(4).unwrap();
        let mut record = vec![0; codec.record_len(4, DType::F32)];
        assert_eq!(record.len(), codec.record_len(5, DType::F32).min(32));
        let encoded = codec.encode(DType::F32, &elements, &mut record, 0, &mut Scratch::default());
        assert!(matches!(encoded, Encoded::Finite));
        let mut decoded = vec![1; 16];
        codec.decode(DType::F32, &record, &mut decoded).unwrap();
        assert_eq!(decoded, elements, "{name}");
        assert!(matches!(codec.check_count(1 << 32), Err(Error::InvalidArgument(_))));
    }
}

/// Invariant 1 in part, and the form of records: a multiple of 32 bytes, empty for no elements, every byte written, and
/// the same bytes when encoded twice.
#[test]
fn records_are_a_multiple_of_32_bytes_and_depend_on_their_arguments_alone() {
    for codec in sets() {
        for dtype in DTYPES {
            assert_eq!(codec.record_len(0, dtype), 0);
            for count in 0..300 {
                let elements = elements(dtype, &ordinary(dtype, count));
                let len = codec.record_len(count, dtype);
                assert!(len.is_multiple_of(ALIGN) && (len > 0) == (count > 0));
                let mut scratch = Scratch { words: vec![u64::MAX; 77], places: vec![5; 3] };
                let (mut ones, mut zeros) = (vec![0xff; len], vec![0; len]);
                let _ = codec.encode(dtype, &elements, &mut ones, 3, &mut scratch);
                let _ = codec.encode(dtype, &elements, &mut zeros, 3, &mut Scratch::default());
                assert_eq!(ones, zeros, "{codec:?} {} {count}", dtype.name());
            }
        }
    }
}

/// Invariant 2.
#[test]
fn parts_of_a_record_have_the_bits_of_the_whole() {
    let seen: Vec<_> = sets().into_iter().filter(|codec| codec.encodes_parts() || codec.decodes_parts()).collect();
    assert!(seen.iter().any(|codec| codec.encodes_parts()));
    for (codec, dtype) in seen.iter().flat_map(|codec| DTYPES.map(|dtype| (codec, dtype))) {
        for count in [1, 77, PART, 2 * PART + 77, 3 * PART] {
            let mut given = ordinary(dtype, count);
            for nan in [false, true] {
                given[count / 2] = if nan { f32::NAN } else { 0.5 };
                let given = elements(dtype, &given);
                let (record, encoded) = record_of(&**codec, dtype, &given, 0);
                if codec.encodes_parts() {
                    let mut parts = vec![0xa5; record.len()];
                    let states: Vec<_> = given
                        .chunks(PART * dtype.size())
                        .enumerate()
                        .map(|(number, part)| codec.encode_part(dtype, part, &mut parts, number * PART))
                        .collect();
                    assert_eq!(parts, record, "{codec:?} {count}");
                    assert_eq!(states.contains(&Encoded::NonFinite), encoded == Encoded::NonFinite);
                }
                if codec.decodes_parts() {
                    let (mut whole, mut parts) = (vec![0xa5; given.len()], vec![0x5a; given.len()]);
                    codec.decode(dtype, &record, &mut whole).unwrap();
                    for (number, part) in parts.chunks_mut(PART * dtype.size()).enumerate() {
                        codec.decode_part(dtype, &record, number * PART, part);
                    }
                    assert_eq!(parts, whole, "{codec:?} {count}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_never_becomes_finite() {
    let lanes = [0, 1, 7, 15, 16, 31, 100, 255, 256, 257, 298, 299];
    for codec in sets() {
        for dtype in DTYPES {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in lanes {
                    let mut given = ordinary(dtype, 300);
                    given[at] = bad;
                    let (back, encoded) = there_and_back(&*codec, dtype, &given);
                    let what = format!("{codec:?} {} {bad} at {at}", dtype.name());
                    match codec.name() {
                        "top_k" if codec.options().contains("chunk") => {
                            assert_eq!(encoded, Encoded::NonFinite, "{what}");
                            assert!(back[at].is_nan(), "{what}");
                        }
                        "f16" | "bf16" | "top_k" => {
                            assert_eq!(encoded, Encoded::Finite, "{what}");
                            assert_eq!(back[at].to_bits() & !(1 << 22), bad.to_bits() & !(1 << 22), "{what}");
                        }
                        "random_k" => {
                            assert_eq!(encoded, Encoded::NonFinite, "{what}");
                            assert!(back.iter().all(|x| x.is_nan() || *x == 0.0), "{what}");
                            assert!(back.iter().any(|x| x.is_nan()), "{what}");
                        }
                        "block_i8" | "int4" => {
                            assert_eq!(encoded, Encoded::NonFinite, "{what}");
                            assert!(back[at].is_nan(), "{what}");
                        }
                        _ => {
                            assert_eq!(encoded, Encoded::NonFinite, "{what}");
                            assert!(back.iter().all(|x| x.is_nan()), "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_block_with_nan_leaves_the_other_blocks_alone() {
    let codec = make("block_i8", &[("block", CodecOption::Int(64))]).unwrap();
    let mut given = ordinary(DType::F32, 200);
    given[70] = f32::NAN;
    let (back, _) = there_and_back(&*codec, DType::F32, &given);
    assert!(back[64..128].iter().all(|x| x.is_nan()));
    assert!(back[..64].iter().chain(&back[128..]).all(|x| x.is_finite()));
}

#[test]
fn ranges_that_float32_cannot_scale_come_back_as_nan() {
    for given in [[3e38f32, -3e38], [1e30, 1e30], [-1e32, -1e32], [f32::MAX, 0.0]] {
        let (back, encoded) = there_and_back(&MinMaxU8, DType::F32, &given);
        let expressible = (given[0] - given[1]).is_finite() && given[1] == 0.0;
        assert_eq!((encoded == Encoded::Finite, back[0].is_finite()), (expressible, expressible), "{given:?}");
    }
}

#[test]
fn the_error_of_minmax_u8_is_at_most_half_a_level() {
    for dtype in DTYPES {
        let given = ordinary(dtype, 4096);
        let (back, _) = there_and_back(&MinMaxU8, dtype, &given);
        let range = given.iter().copied().fold(f32::MIN, f32::max) - given.iter().copied().fold(f32::MAX, f32::min);
        // The bound adds half a step of the element type and the roundings of the float32 arithmetic.
        let own = match dtype {
            DType::F32 => 1e-6,
            DType::F16 => 1.0 / 2048.0,
            _ => 1.0 / 256.0,
        };
        for (x, y) in given.iter().zip(&back) {
            assert!((x - y).abs() <= range / 510.0 + own * x.abs() + 1e-6, "{x} {y}");
        }
    }
}

#[test]
fn top_k_keeps_the_largest_magnitudes_and_random_k_distinct_elements() {
    for dtype in DTYPES {
        let given: Vec<f32> = ordinary(dtype, 300);
        let kept = |name| {
            let codec = make(name, &[("k", CodecOption::Int(30))]).unwrap();
            let (back, _) = there_and_back(&*codec, dtype, &given);
            assert!(back.iter().zip(&given).all(|(y, x)| *y == 0.0 || y == x));
            back.iter().filter(|y| **y != 0.0).map(|y| y.abs()).collect::<Vec<f32>>()
        };
        let mut magnitudes: Vec<f32> = given.iter().map(|x| x.abs()).collect();
        magnitudes.sort_by(f32::total_cmp);
        let mut top = kept("top_k");
        top.sort_by(f32::total_cmp);
        assert_eq!(top, magnitudes[270..]);
        assert_eq!(kept("random_k").len(), 30);
    }
}

#[test]
fn chunks_of_top_k_keep_the_largest_of_each_and_lose_less_than_they_had() {
    for (k, chunk, count) in
        [(64usize, 4096usize, 10_000usize), (1, 1, 5), (7, 100, 1000), (300, 4096, 4096), (9, 2, 7)]
    {
        let options = [("k", CodecOption::Int(k as i64)), ("chunk", CodecOption::Int(chunk as i64))];
        let codec = make("top_k", &options).unwrap();
        for dtype in DTYPES {
            // Many are equal, and one is far larger than the others of its chunk.
            let mut given: Vec<f32> = ordinary(dtype, count);
            given[count / 2] = 30_000.0;
            let (back, _) = there_and_back(&*codec, dtype, &given);
            for (given, back) in given.chunks(chunk).zip(back.chunks(chunk)) {
                let mut places: Vec<usize> = (0..given.len()).collect();
                places.sort_by(|a, b| given[*b].abs().total_cmp(&given[*a].abs()).then(a.cmp(b)));
                places.truncate(k);
                let kept = |at: usize| places.contains(&at) && given[at] != 0.0;
                assert!((0..given.len()).all(|at| (back[at] != 0.0) == kept(at)), "{codec:?}");
                assert!(places.iter().all(|at| back[*at] * given[*at] >= 0.0));
                let squares = |x: f64| x * x;
                let had: f64 = places.iter().map(|at| squares(given[*at].into())).sum();
                let lost: f64 = places.iter().map(|at| squares(f64::from(given[*at]) - f64::from(back[*at]))).sum();
                assert!(lost < had || had == 0.0, "{codec:?} {lost} {had}");
            }
        }
    }
}

#[test]
fn positions_of_a_chunk_that_do_not_ascend_or_that_no_element_has_are_refused() {
    let codec = make("top_k", &[("k", CodecOption::Int(2)), ("chunk", CodecOption::Int(10))]).unwrap();
    for places in [[1u32, 1], [2, 1], [0, 10], [10, 11], [4095, 0], [0, 4095]] {
        let mut record = vec![0; 32];
        record[4..8].copy_from_slice(&(places[0] | places[1] << 12).to_le_bytes());
        let refused = decoded(&*codec, DType::F32, &record, 10);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{places:?}");
    }
}

#[test]
fn random_k_draws_anew_and_the_same_for_the_same_seed() {
    let places = |seed, draw| {
        let codec = make("random_k", &[("k", CodecOption::Int(20)), ("seed", CodecOption::Int(seed))]).unwrap();
        let (record, _) = record_of(&*codec, DType::F32, &[0; 4000], draw);
        record[..80].to_vec()
    };
    assert_eq!(places(3, 9), places(3, 9));
    assert_ne!(places(3, 9), places(3, 10));
    assert_ne!(places(3, 9), places(4, 9));
    // Each element should be drawn 2000 / 5 times, with a standard deviation of 18.
    let codec = make("random_k", &[("k", CodecOption::Int(4))]).unwrap();
    let mut times = [0u32; 20];
    for draw in 0..2000 {
        let (record, _) = record_of(&*codec, DType::F32, &[0; 80], draw);
        record[..16].chunks_exact(4).for_each(|place| times[place[0] as usize] += 1);
    }
    assert!(times.iter().all(|&times| times.abs_diff(400) < 120), "{times:?}");
}

#[test]
fn records_of_another_length_are_refused() {
    for codec in sets() {
        for dtype in DTYPES {
            for count in [0, 1, 100] {
                let len = codec.record_len(count, dtype);
                for other in [0, 1, len.saturating_sub(1), len + 1, len + 32].into_iter().filter(|other| *other != len)
                {
                    let refused = decoded(&*codec, dtype, &vec![0; other], count);
                    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{codec:?} {count} {other}");
                }
            }
        }
    }
}

#[test]
fn places_that_do_not_ascend_or_that_no_element_has_are_refused() {
    for name in ["top_k", "random_k"] {
        let codec = make(name, &[("k", CodecOption::Int(2))]).unwrap();
        for places in [[1u32, 1], [2, 1], [0, 10], [10, 11], [u32::MAX, 0], [0, u32::MAX]] {
            let mut record = vec![0; 32];
            record[..4].copy_from_slice(&places[0].to_le_bytes());
            record[4..8].copy_from_slice(&places[1].to_le_bytes());
            let refused = decoded(&*codec, DType::F32, &record, 10);
            assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{places:?}");
        }
        let fewer = make(name, &[("k", CodecOption::Int(1))]).unwrap();
        assert!(decoded(&*fewer, DType::F32, &vec![0; codec.record_len(100, DType::F32) * 8], 100).is_err());
    }
}

#[test]
fn chunks_are_encoded_each_on_its_own() {
    for codec in sets() {
        for dtype in DTYPES {
            let elements = elements(dtype, &ordinary(dtype, 120));
            let len = chunks::records_len(&*codec, dtype, 120, 3).unwrap();
            let (mut records, mut scratch) = (vec![0xa5; len], Scratch::default());
            let _ = chunks::encode(&*codec, dtype, &elements, 3, &mut records, || 4, &mut scratch).unwrap();
            let parts = elements.chunks_exact(40 * dtype.size()).enumerate();
            let alone: Vec<u8> =
                parts.flat_map(|(i, part)| record_of(&*codec, dtype, part, chunks::draw(4, i)).0).collect();
            assert_eq!(records, alone, "{codec:?}");
            let mut back = vec![0xa5; elements.len()];
            chunks::decode(&*codec, dtype, &records, 3, &mut back).unwrap();
            let apart: Vec<f32> = (0..3)
                .flat_map(|i| decoded(&*codec, dtype, &records[i * len / 3..(i + 1) * len / 3], 40).unwrap())
                .collect();
            assert_eq!(values(dtype, &back), apart);
        }
    }
}

#[test]
fn chunks_that_do_not_divide_or_fit_are_refused() {
    let codec = make("minmax_u8", &[]).unwrap();
    for (count, chunks) in [(10, 3), (10, 0), (0, 0), (3, 6), (usize::MAX, 1), (usize::MAX / 16, usize::MAX / 16)] {
        assert!(matches!(chunks::records_len(&*codec, DType::F32, count, chunks), Err(Error::InvalidArgument(_))));
    }
    assert_eq!(chunks::records_len(&*codec, DType::F32, 0, 5).unwrap(), 0);
    assert!(matches!(chunks::records_len(&*codec, DType::F64, 10, 1), Err(Error::UnsupportedType(_))));
    let wrong = chunks::encode(&*codec, DType::F32, &[0; 40], 2, &mut [0; 64], || panic!(), &mut Scratch::default());
    assert!(matches!(wrong, Err(Error::InvalidArgument(_))));
    assert!(chunks::decode(&*codec, DType::F32, &[0; 64], 2, &mut [0; 40]).is_err());
}

fn any_codec() -> impl Strategy<Value = Arc<dyn Codec>> {
    let sets = sets();
    (0..sets.len()).prop_map(move |at| sets[at].clone())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Invariant 3.
    #[test]
    fn hostile_records_give_an_error_or_values(
        codec in any_codec(),
        dtype in prop::sample::select(DTYPES.to_vec()),
        count in 0usize..300,
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        fits in prop::bool::weighted(0.8),
        small in any::<bool>(),
    ) {
        let mut record = bytes;
        if fits {
            record.resize(codec.record_len(count, dtype), 0);
        }
        if small {
            // Makes all places smaller than 256.
            record.iter_mut().enumerate().for_each(|(i, byte)| if i % 4 != 0 { *byte = 0 });
        }
        let result = decoded(&*codec, dtype, &record, count);
        prop_assert!(result.is_err() || result.unwrap().len() == count);
    }
}

/// A codec that can run its loops on a given level, or the reference for `None`.
pub(super) trait AtLevel: Codec {
    fn encode_at(&self, level: Option<Level>, dtype: DType, elements: &[u8], record: &mut [u8]) -> Encoded;
    fn decode_at(&self, level: Option<Level>, dtype: DType, record: &[u8], elements: &mut [u8]);
}

/// Float32 of several kinds: ordinary ones, finite ones halfway between two levels or at a format's limits, any bits.
fn any_values() -> impl Strategy<Value = Vec<f32>> {
    let ordinary = -1.0f32..1.0;
    let edges = prop::sample::select(vec![
        0.0,
        -0.0,
        0.5,
        1.5,
        -2.5,
        1.0,
        -1.0,
        127.0,
        -127.0,
        255.0,
        128.5,
        1e-45,
        -1e-45,
        1.1754942e-38,
        1e-40,
        6e-8,
        1e-7,
        65504.0,
        -65504.0,
        3.0,
        1.0 + f32::EPSILON,
        1e4,
        16_777_216.0,
    ]);
    let huge = prop::sample::select(vec![f32::MAX, f32::MIN, 1e38, -1e38, 1e30, 65520.0, 1e10, 0.0]);
    let bits = any::<u32>().prop_map(f32::from_bits);
    let mostly = (-1.0f32..1.0, 0u32..200).prop_map(|(x, odds)| match odds {
        0 => f32::NAN,
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        _ => x,
    });
    let len = 1usize..300;
    prop_oneof![
        prop::collection::vec(ordinary, len.clone()),
        prop::collection::vec(edges, len.clone()),
        prop::collection::vec(huge, len.clone()),
        prop::collection::vec(bits, len.clone()),
        prop::collection::vec(mostly, len),
        // A shifted range, whose levels are large numbers.
        (prop::collection::vec(-1.0f32..1.0, 1..300), -1e6f32..1e6)
            .prop_map(|(values, by)| values.iter().map(|x| x + by).collect()),
    ]
}

/// Asserts that every level, at any address, encodes and decodes as the reference does, also arbitrary records.
pub(super) fn compare<C: AtLevel>(codec: &C) {
    use proptest::test_runner::{Config, TestRunner};

    let cases = (prop::sample::select(DTYPES.to_vec()), any_values(), 0usize..64, 0usize..64, any::<u64>());
    let mut kinds = std::cell::Cell::new([0; 2]);
    let check = |(dtype, given, at, record_at, noise): (DType, Vec<f32>, usize, usize, u64)| {
        let given = elements(dtype, &given);
        let count = given.len() / dtype.size();
        let len = codec.record_len(count, dtype);
        let mut expected = vec![0x5a; len];
        let encoded = codec.encode_at(None, dtype, &given, &mut expected);
        let mut seen = kinds.get();
        seen[usize::from(encoded == Encoded::Finite)] += 1;
        kinds.set(seen);
        let mut hostile = expected.clone();
        hostile.iter_mut().enumerate().for_each(|(i, byte)| *byte ^= (noise >> (i % 57)) as u8);
        for level in Level::available() {
            let from = [vec![0; at], given.clone()].concat();
            let mut record = vec![0xa5; record_at + len + 1];
            let got = codec.encode_at(Some(level), dtype, &from[at..], &mut record[record_at..record_at + len]);
            prop_assert_eq!(got, encoded, "{}", level.name());
            prop_assert_eq!(&record[record_at..record_at + len], &expected[..], "{} {}", level.name(), dtype.name());
            prop_assert_eq!(record[record_at + len], 0xa5);
            for bytes in [&expected, &hostile] {
                let moved = [vec![0; record_at], bytes.clone()].concat();
                let mut back = vec![0x5a; given.len()];
                codec.decode_at(None, dtype, bytes, &mut back);
                let mut elements = vec![0xa5; at + given.len() + 1];
                codec.decode_at(Some(level), dtype, &moved[record_at..], &mut elements[at..at + given.len()]);
                prop_assert_eq!(&elements[at..at + given.len()], &back[..], "{} {}", level.name(), dtype.name());
                prop_assert_eq!(elements[at + given.len()], 0xa5);
            }
        }
        Ok(())
    };
    TestRunner::new(Config::with_cases(2000)).run(&cases, check).unwrap();
    let [non_finite, finite] = *kinds.get_mut();
    assert!(finite > 500, "{finite}");
    assert!(non_finite > 100 || ["f16", "bf16"].contains(&codec.name()), "{non_finite}");
}
