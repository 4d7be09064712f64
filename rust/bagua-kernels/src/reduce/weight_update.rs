//! The arithmetic of asynchronous averaging, for weights that changed since their snapshot.

use half::{bf16, f16};

use crate::types::DType;

/// A float type in memory, and the type for its arithmetic.
trait Float<const N: usize> {
    type Wide: Copy + PartialEq + std::ops::Add<Output = Self::Wide> + std::ops::Sub<Output = Self::Wide>;
    fn load(bytes: [u8; N]) -> Self::Wide;
    fn store(value: Self::Wide) -> [u8; N];
}

macro_rules! float {
    ($($name:ident($size:literal, $wide:ty, $load:expr, $store:expr)),*) => {$(
        struct $name;

        impl Float<$size> for $name {
            type Wide = $wide;
            #[inline(always)]
            fn load(bytes: [u8; $size]) -> $wide {
                $load(bytes)
            }
            #[inline(always)]
            fn store(value: $wide) -> [u8; $size] {
                $store(value)
            }
        }
    )*};
}

// The `_const` conversions are integer arithmetic. The others detect the processor's features at every element.
float!(
    F32(4, f32, f32::from_ne_bytes, f32::to_ne_bytes),
    F64(8, f64, f64::from_ne_bytes, f64::to_ne_bytes),
    F16(2, f32, |bytes| f16::from_ne_bytes(bytes).to_f32_const(), |value| f16::from_f32_const(value).to_ne_bytes()),
    Bf16(2, f32, |bytes| bf16::from_ne_bytes(bytes).to_f32_const(), |value| bf16::from_f32_const(value).to_ne_bytes())
);

/// Computes `weights = average` for elements that still have the bits of `snapshot`, and `weights + (average -
/// snapshot)` for all others. Half types are computed in float32 and rounded once.
///
/// A rank that did not train meanwhile thus gets exactly the average, and one that did keeps its progress. Panics if
/// `dtype` is not a real float type, or if the lengths differ or are not a multiple of its size.
pub fn correct(dtype: DType, weights: &mut [u8], average: &[u8], snapshot: &[u8]) {
    match dtype {
        DType::F16 => correct_as::<F16, 2>(weights, average, snapshot),
        DType::BF16 => correct_as::<Bf16, 2>(weights, average, snapshot),
        DType::F32 => correct_as::<F32, 4>(weights, average, snapshot),
        DType::F64 => correct_as::<F64, 8>(weights, average, snapshot),
        other => panic!("averaging {} should have been refused", other.name()),
    }
}

/// Computes `out = values - base` by element. Half types are computed in float32 and rounded once. Panics like
/// [`correct`].
pub fn subtract(dtype: DType, out: &mut [u8], values: &[u8], base: &[u8]) {
    match dtype {
        DType::F16 => subtract_as::<F16, 2>(out, values, base),
        DType::BF16 => subtract_as::<Bf16, 2>(out, values, base),
        DType::F32 => subtract_as::<F32, 4>(out, values, base),
        DType::F64 => subtract_as::<F64, 8>(out, values, base),
        other => panic!("averaging {} should have been refused", other.name()),
    }
}

fn units<const N: usize>(bytes: &[u8], len: usize) -> &[[u8; N]] {
    assert!(bytes.len() == len && len.is_multiple_of(N), "{} bytes instead of {len}", bytes.len());
    bytes.as_chunks().0
}

fn correct_as<F: Float<N>, const N: usize>(weights: &mut [u8], average: &[u8], snapshot: &[u8]) {
    let (average, snapshot) = (units::<N>(average, weights.len()), units::<N>(snapshot, weights.len()));
    for ((weight, average), snapshot) in weights.as_chunks_mut::<N>().0.iter_mut().zip(average).zip(snapshot) {
        let moved = F::store(F::load(*weight) + (F::load(*average) - F::load(*snapshot)));
        *weight = if weight == snapshot { *average } else { moved };
    }
}

fn subtract_as<F: Float<N>, const N: usize>(out: &mut [u8], values: &[u8], base: &[u8]) {
    let (values, base) = (units::<N>(values, out.len()), units::<N>(base, out.len()));
    for ((out, value), base) in out.as_chunks_mut::<N>().0.iter_mut().zip(values).zip(base) {
        *out = F::store(F::load(*value) - F::load(*base));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    #[test]
    fn weights_at_rest_become_the_average_and_moved_ones_keep_their_progress() {
        // For some orders of operations, 1e8 + (1 - 1e8) is not 1 in float32. For unchanged weights it must be.
        let (snapshot, average) = (bytes_of(&[1e8, 2.0, -0.0]), bytes_of(&[1.0, 3.0, 0.5]));
        let mut weights = bytes_of(&[1e8, 2.5, 0.0]);
        correct(DType::F32, &mut weights, &average, &snapshot);
        assert_eq!(weights, bytes_of(&[1.0, 3.5, 0.5]));
    }

    #[test]
    fn half_types_are_computed_in_float32_and_rounded_once() {
        let half = |values: &[f32]| -> Vec<u8> {
            values.iter().flat_map(|value| f16::from_f32(*value).to_ne_bytes()).collect()
        };
        // In float16, the difference 2048.5 - 0.25 would round to 2048 before it is added.
        let mut weights = half(&[1.0]);
        correct(DType::F16, &mut weights, &half(&[2048.0]), &half(&[0.25]));
        assert_eq!(weights, half(&[2048.75]));
        let mut out = half(&[0.0]);
        subtract(DType::F16, &mut out, &half(&[3.5]), &half(&[1.25]));
        assert_eq!(out, half(&[2.25]));
        let brain = |value: f32| bf16::from_f32(value).to_ne_bytes().to_vec();
        let mut weights = brain(4.0);
        correct(DType::BF16, &mut weights, &brain(3.0), &brain(1.0));
        assert_eq!(weights, brain(6.0));
    }

    #[test]
    fn float64_keeps_its_precision() {
        let mut weights = 1.0f64.to_ne_bytes();
        correct(DType::F64, &mut weights, &(1.0f64 + 1e-12).to_ne_bytes(), &0.5f64.to_ne_bytes());
        assert_eq!(f64::from_ne_bytes(weights), 1.0 + (1.0 + 1e-12 - 0.5));
    }

    #[test]
    #[should_panic(expected = "should have been refused")]
    fn integers_have_no_average() {
        correct(DType::I32, &mut [0; 4], &[0; 4], &[0; 4]);
    }
}
