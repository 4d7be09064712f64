//! Which compilation of the loops runs: the levels of instructions that this processor has, and the element type of each level.

#[cfg(target_arch = "x86_64")]
use super::avx2::{Avx2, Bf16x16, F16x8, F32x16};
#[cfg(target_arch = "x86_64")]
use super::avx512::{Avx512, Bf16x32, F16x32};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use super::element::F16 as F16x8;
#[cfg(not(target_arch = "x86_64"))]
use super::element::{
    Bf16 as Bf16x16, Bf16 as Bf16x32, Bf16 as ZenBf16, F16 as F16x32, F16 as ZenF16, F32 as F32x16, F32 as ZenF32,
};
use super::element::{Bf16, Element, F16, F32, Widen};
use super::kernel::Work;
#[cfg(target_arch = "aarch64")]
use super::neon::F16x8;
use super::op::Op;
#[cfg(target_arch = "x86_64")]
use super::zen4::{Bf16x32 as ZenBf16, F16x32 as ZenF16, F32x16 as ZenF32, Zen4};

/// Which compilation of the kernels runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// The instructions that every processor of the target has.
    Portable,
    /// 256-bit registers and the half-precision conversions of x86-64 processors since 2013.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 512-bit registers for the half types; the rest as on [`Level::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512, Avx2),
    /// 256- and 512-bit registers as AMD's processors execute them fastest.
    #[cfg(target_arch = "x86_64")]
    Zen4(Zen4, Avx2),
    /// The half-precision conversions that every 64-bit ARM processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// The fastest that this processor has.
    #[inline]
    pub(super) fn best() -> Level {
        #[cfg(target_arch = "x86_64")]
        if Zen4::is_best()
            && let Some(zen4) = Level::zen4()
        {
            return zen4;
        }
        Level::generic().next().expect("every processor has the portable level")
    }

    /// All that this processor has.
    pub(super) fn available() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let special = Level::zen4();
        #[cfg(not(target_arch = "x86_64"))]
        let special = None;
        Level::generic().chain(special)
    }

    /// Its name in benchmarks.
    pub(super) fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(..) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Zen4(..) => "zen4",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn zen4() -> Option<Level> {
        Zen4::new().zip(Avx2::new()).map(|(zen4, avx2)| Level::Zen4(zen4, avx2))
    }

    /// Those for processors of any vendor, the widest first. The standard library caches the detection.
    #[inline]
    fn generic() -> impl Iterator<Item = Level> {
        #[cfg(target_arch = "x86_64")]
        let wide = {
            let avx2 = Avx2::new();
            let avx512 = avx2.zip(Avx512::new()).map(|(avx2, avx512)| Level::Avx512(avx512, avx2));
            avx512.into_iter().chain(avx2.map(Level::Avx2))
        };
        #[cfg(target_arch = "aarch64")]
        let wide = std::iter::once(Level::Neon);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let wide = std::iter::empty();
        wide.chain([Level::Portable])
    }
}

impl Widen for F16 {
    type Wide = F16x8;
    type Widest = F16x32;
    type Zen = ZenF16;
}

impl Widen for Bf16 {
    type Wide = Bf16x16;
    type Widest = Bf16x32;
    type Zen = ZenBf16;
}

impl Widen for F32 {
    type Wide = F32x16;
    type Widest = Self;
    type Zen = ZenF32;
}

/// Runs the loop at the given level: the widest element as far as it goes, narrower ones for the rest.
pub(super) fn run<E, O>(level: Level, op: O, mut work: Work<'_, '_>)
where
    E: Widen,
    O: Op<E::Acc> + Op<<E::Wide as Element>::Acc> + Op<<E::Widest as Element>::Acc> + Op<<E::Zen as Element>::Acc>,
{
    let len = work.len();
    // The sizes are known at compile time: no loop is compiled that would never run.
    let done = match level {
        Level::Portable => 0,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(avx2) | Level::Avx512(_, avx2) | Level::Zen4(_, avx2) => {
            let mut done = 0;
            match level {
                Level::Avx512(avx512, _) if size::<E::Widest>() > size::<E>() => {
                    done = len - len % size::<E::Widest>();
                    avx512.run::<E::Widest, O>(op, &mut work, 0..done);
                }
                // A 64-byte store to an address that is no multiple of 64 writes two cache lines: with float32, whose loop only loads
                // and stores, that takes 1.2 times as long as two registers of 32 bytes (reduce_scatter of 1 MiB in an arena).
                Level::Zen4(zen4, _) if size::<E::Zen>() > size::<E>() && (size::<E>() < 4 || work.is_aligned()) => {
                    done = len - len % size::<E::Zen>();
                    zen4.run::<E::Zen, O>(op, &mut work, 0..done);
                }
                _ => {}
            }
            let wide = len - len % size::<E::Wide>();
            if done < wide {
                avx2.run::<E::Wide, O>(op, &mut work, done..wide);
            }
            if size::<E::Wide>() > size::<E>() && wide < len {
                avx2.run::<E, O>(op, &mut work, wide..len);
            }
            len
        }
        #[cfg(target_arch = "aarch64")]
        Level::Neon if size::<E::Wide>() > size::<E>() => {
            let wide = len - len % size::<E::Wide>();
            work.run::<E::Wide, O>(op, 0..wide);
            wide
        }
        #[cfg(target_arch = "aarch64")]
        Level::Neon => 0,
    };
    if done < len {
        work.run::<E, O>(op, done..len);
    }
}

/// Bytes of a unit.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn size<E: Element>() -> usize {
    size_of::<E::Bytes>()
}
