//! Averaging with some of the ranks: the mean of a member's weights and its peers', written once over `exchange`.
//!
//! Sources: Lian et al., NeurIPS 2017 (arXiv:1705.09056) for decentralized training; Assran et al., ICML 2019 (arXiv:1811.10792) and
//! Ying et al., NeurIPS 2021 (arXiv:2110.13363) for exponential graphs; the original's `shift_one` pairs. The compressed ring is
//! DCD-PSGD of Tang et al., NeurIPS 2018 (arXiv:1803.06443), as the original has it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::{Chunks, Collective, Incoming, OpContext, Outgoing};
use crate::codec::float::{Float, ForFloat, for_dtype};
use crate::codec::{Codec, Encoded, Scratch};
use crate::error::{Error, Result};
use crate::memory::BufferMut;
use crate::reduce::combine;
use crate::types::ReduceOp;

/// Whose weights a member averages with its own. n is the number of members, i a member, r the round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PeerSelection {
    /// Everybody's.
    All = 0,
    /// One member's of the other half of all members, another one in each round; pairs are mutual. n must be even or 1.
    ShiftOne = 1,
    /// Those of i - 1 and i + 1.
    Ring = 2,
    /// Those of i + 2^j for all 2^j < n.
    Exponential = 3,
    /// That of i + 2^(r mod ceil(log2 n)).
    OnePeerExponential = 4,
}

impl PeerSelection {
    /// Every selection, in the order of the codes.
    pub const ALL: [PeerSelection; 5] = [
        PeerSelection::All,
        PeerSelection::ShiftOne,
        PeerSelection::Ring,
        PeerSelection::Exponential,
        PeerSelection::OnePeerExponential,
    ];

    /// The name that the Python API uses.
    pub const fn name(self) -> &'static str {
        match self {
            PeerSelection::All => "all",
            PeerSelection::ShiftOne => "shift_one",
            PeerSelection::Ring => "ring",
            PeerSelection::Exponential => "exponential",
            PeerSelection::OnePeerExponential => "one_peer_exponential",
        }
    }

    /// The selection of this name.
    ///
    /// # Errors
    /// `InvalidArgument` that lists the known ones.
    pub fn by_name(name: &str) -> Result<PeerSelection> {
        PeerSelection::ALL.into_iter().find(|selection| selection.name() == name).ok_or_else(|| {
            let known = PeerSelection::ALL.map(PeerSelection::name).join(", ");
            Error::InvalidArgument(format!("no peer selection mode '{name}'; known: {known}"))
        })
    }

    /// Whether it works among so many members.
    ///
    /// # Errors
    /// `InvalidArgument` for shift_one among an odd number above 1, which it names.
    pub fn check(self, members: usize) -> Result<()> {
        if self == PeerSelection::ShiftOne && members > 1 && members % 2 == 1 {
            return Err(Error::InvalidArgument(format!(
                "shift_one pairs each member of the first half with one of the second half: it needs an even number of members, \
                 not {members}"
            )));
        }
        Ok(())
    }

    /// The members whose weights member `i` of `n` takes in round `r`, ascending, without itself.
    fn peers(self, i: usize, n: usize, r: u64) -> Vec<usize> {
        let step = |distance: usize| (i + distance) % n;
        let mut peers: Vec<usize> = match self {
            PeerSelection::All => (0..n).collect(),
            PeerSelection::ShiftOne if n < 2 => Vec::new(),
            PeerSelection::ShiftOne => {
                let half = n / 2;
                let turn = (r % half as u64) as usize;
                if i < half { vec![(turn + i) % half + half] } else { vec![(i - half + half - turn) % half] }
            }
            PeerSelection::Ring => vec![step(n - 1), step(1)],
            PeerSelection::Exponential => powers(n).map(step).collect(),
            PeerSelection::OnePeerExponential => {
                let count = powers(n).count().max(1) as u64;
                powers(n).nth((r % count) as usize).map(step).into_iter().collect()
            }
        };
        peers.retain(|peer| *peer != i);
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// The members that take the weights of member `i`, ascending.
    fn takers(self, i: usize, n: usize, r: u64) -> Vec<usize> {
        (0..n).filter(|member| self.peers(*member, n, r).contains(&i)).collect()
    }
}

/// The powers of two below n.
fn powers(n: usize) -> impl Iterator<Item = usize> {
    (0..usize::BITS).map(|j| 1usize << j).take_while(move |power| *power < n)
}

/// `mean` = the mean of `weights` and the peers', in member order, divided once. Alone it is a copy.
///
/// # Errors
/// As [`Collective::run`].
pub fn average(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    selection: PeerSelection,
    round: u64,
    weights: &[u8],
    mean: &mut [u8],
    received: &mut Vec<u8>,
) -> Result<()> {
    let (me, n) = (collective.rank(), collective.size());
    let peers = selection.peers(me, n, round);
    let takers = selection.takers(me, n, round);
    received.resize(peers.len() * weights.len(), 0);
    if weights.is_empty() {
        return Ok(());
    }
    let sends: Vec<_> = takers.iter().map(|peer| Outgoing::new(*peer, cx.fingerprint, weights)).collect();
    let parts = peers.iter().zip(received.chunks_mut(weights.len()));
    let mut recvs: Vec<_> = parts.map(|(peer, data)| Incoming::new(*peer, cx.fingerprint, data)).collect();
    collective.exchange(cx, &sends, &mut recvs)?;
    let start = Instant::now();
    let mut inputs: Vec<(usize, &[u8])> = peers.iter().copied().zip(received.chunks(weights.len())).collect();
    inputs.push((me, weights));
    inputs.sort_unstable_by_key(|(member, _)| *member);
    let inputs: Vec<_> = inputs.into_iter().map(|(_, data)| Some(data)).collect();
    combine(cx.dtype(), ReduceOp::Avg, &inputs, mean);
    cx.stats.add_reduce(start.elapsed());
    Ok(())
}

/// Replicas of the compressed ring, each of the length of the weights and in the same place: what the neighbours know.
pub struct Replicas<'a> {
    /// Own weights as both neighbours have them.
    pub own: BufferMut<'a>,
    /// Those of the left neighbour, member i - 1.
    pub left: BufferMut<'a>,
    /// Those of the right neighbour, member i + 1.
    pub right: BufferMut<'a>,
}

impl Replicas<'_> {
    /// The same for a shorter time.
    pub fn reborrow(&mut self) -> Replicas<'_> {
        Replicas { own: self.own.reborrow(), left: self.left.reborrow(), right: self.right.reborrow() }
    }
}

/// Memory of [`compressed_ring`] that is kept between calls.
#[derive(Debug, Default)]
pub struct Workspace {
    /// The difference to encode, and then what a record decodes to.
    elements: Vec<u8>,
    sent: Vec<u8>,
    left: Vec<u8>,
    right: Vec<u8>,
    scratch: Scratch,
}

/// One round of the compressed ring: with W, L, R the replicas and x the weights, d = x + L/3 + R/3 - 5/3 W goes encoded to both
/// neighbours; L and R take up the neighbours' differences, W its own, and x becomes W. So W is to the bit what both neighbours
/// hold. Alone, W becomes x.
///
/// On a device that has the codec all of it stays there, and only records come to the host: those of the host, byte for byte.
///
/// # Errors
/// `UnsupportedType` on a device where the collective has not the codec; otherwise as [`Collective::codec_on`] and [`Collective::run`].
pub fn compressed_ring(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    codec: &dyn Codec,
    draw: u64,
    weights: BufferMut<'_>,
    mut replicas: Replicas<'_>,
    work: &mut Workspace,
) -> Result<()> {
    if collective.size() == 1 || weights.is_empty() {
        return replicas.own.copy_in_place(weights.as_buffer());
    }
    let count = weights.len() / cx.dtype().size();
    codec.check_count(count)?;
    let record = codec.record_len(count, cx.dtype());
    for bytes in [&mut work.sent, &mut work.left, &mut work.right] {
        bytes.resize(record, 0);
    }
    match weights.device() {
        None => ring_on_host(collective, cx, codec, draw, weights.into_host()?, replicas, work),
        Some(_) => ring_on_device(collective, cx, codec, weights, replicas, work),
    }
}

fn ring_on_host(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    codec: &dyn Codec,
    draw: u64,
    weights: &mut [u8],
    replicas: Replicas<'_>,
    work: &mut Workspace,
) -> Result<()> {
    let dtype = cx.dtype();
    let (own, left, right) = (replicas.own.into_host()?, replicas.left.into_host()?, replicas.right.into_host()?);
    work.elements.resize(weights.len(), 0);
    let start = Instant::now();
    for_dtype(dtype, Difference { weights, own, left, right, out: &mut work.elements });
    if codec.encode(dtype, &work.elements, &mut work.sent, draw, &mut work.scratch) == Encoded::NonFinite {
        cx.stats.nonfinite_records.fetch_add(1, Relaxed);
    }
    cx.stats.add_encode(start.elapsed());
    with_neighbours(collective, cx, work)?;
    let start = Instant::now();
    for (record, replica) in [(&work.left, left), (&work.right, right), (&work.sent, &mut *own)] {
        codec.decode(dtype, record, &mut work.elements)?;
        for_dtype(dtype, Take { replica, difference: &work.elements });
    }
    weights.copy_from_slice(own);
    cx.stats.add_encode(start.elapsed());
    Ok(())
}

fn ring_on_device(
    collective: &mut dyn Collective,
    cx: &OpContext<'_>,
    codec: &dyn Codec,
    mut weights: BufferMut<'_>,
    replicas: Replicas<'_>,
    work: &mut Workspace,
) -> Result<()> {
    let dtype = cx.dtype();
    let Some(mut on_device) = collective.codec_on(weights.device(), codec, dtype)? else {
        return Err(Error::UnsupportedType(format!("codec {} does not run where the weights are", codec.name())));
    };
    let Replicas { mut own, left, right } = replicas;
    let count = weights.len() / dtype.size();
    let chunks = Chunks { dtype, chunks: 1, count, elements: count, record: work.sent.len() };
    let start = Instant::now();
    let known = [left.as_buffer(), right.as_buffer(), own.as_buffer()];
    on_device.encode_difference(cx, &chunks, weights.as_buffer(), known, &mut work.sent)?;
    cx.stats.nonfinite_records.fetch_add(u64::from(on_device.is_nonfinite(&chunks, &work.sent)), Relaxed);
    cx.stats.add_encode(start.elapsed());
    with_neighbours(collective, cx, work)?;
    let start = Instant::now();
    for (record, replica) in [(&work.left, left), (&work.right, right), (&work.sent, own.reborrow())] {
        on_device.add(cx, &chunks, record, replica)?;
    }
    weights.copy_in_place(own.as_buffer())?;
    cx.stats.add_encode(start.elapsed());
    Ok(())
}

/// The record goes to both neighbours, and theirs come.
fn with_neighbours(collective: &mut dyn Collective, cx: &OpContext<'_>, work: &mut Workspace) -> Result<()> {
    let (me, n) = (collective.rank(), collective.size());
    let (before, after) = ((me + n - 1) % n, (me + 1) % n);
    let mut sends = vec![Outgoing::new(before, cx.fingerprint, &work.sent)];
    let mut recvs = vec![Incoming::new(before, cx.fingerprint, &mut work.left)];
    // Of two members each is both neighbours of the other: one record serves for both.
    if before != after {
        sends.push(Outgoing::new(after, cx.fingerprint, &work.sent));
        recvs.push(Incoming::new(after, cx.fingerprint, &mut work.right));
    }
    collective.exchange(cx, &sends, &mut recvs)?;
    if before == after {
        work.right.copy_from_slice(&work.left);
    }
    Ok(())
}

/// out = weights + left / 3 + right / 3 - 5/3 own, in float32 with one rounding per operation, rounded.
struct Difference<'a> {
    weights: &'a [u8],
    own: &'a [u8],
    left: &'a [u8],
    right: &'a [u8],
    out: &'a mut [u8],
}

impl ForFloat for Difference<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        const THIRD: f32 = 1.0 / 3.0;
        const FIVE_THIRDS: f32 = 5.0 / 3.0;
        let all = [self.weights, self.left, self.right, self.own].map(|bytes| bytes.chunks_exact(T::SIZE).map(T::load));
        let [x, l, r, w] = all;
        for ((((out, x), l), r), w) in self.out.chunks_exact_mut(T::SIZE).zip(x).zip(l).zip(r).zip(w) {
            T::store(x + l * THIRD + r * THIRD - w * FIVE_THIRDS, out);
        }
    }
}

/// replica += difference, rounded.
struct Take<'a> {
    replica: &'a mut [u8],
    difference: &'a [u8],
}

impl ForFloat for Take<'_> {
    type Output = ();

    fn run<T: Float>(self) {
        for (replica, d) in self.replica.chunks_exact_mut(T::SIZE).zip(self.difference.chunks_exact(T::SIZE)) {
            T::store(T::load(replica) + T::load(d), replica);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shift_one_pairs_are_mutual_and_of_one_member_of_each_half() {
        for n in [2, 4, 6, 8, 16] {
            for r in 0..20 {
                for i in 0..n {
                    let [peer] = PeerSelection::ShiftOne.peers(i, n, r)[..] else { panic!("one peer") };
                    assert_eq!(PeerSelection::ShiftOne.peers(peer, n, r), [i], "n {n} r {r}");
                    assert_ne!(peer < n / 2, i < n / 2, "n {n} r {r}");
                    let half = n / 2;
                    let expected = if i < half {
                        (r as usize + i) % n.div_ceil(2) + half
                    } else {
                        (i as i64 - half as i64 - r as i64).rem_euclid(half as i64) as usize
                    };
                    assert_eq!(peer, expected, "the formula of the original");
                }
            }
        }
    }

    #[test]
    fn peers_of_rings_and_exponential_graphs() {
        assert_eq!(PeerSelection::Ring.peers(0, 5, 0), [1, 4]);
        assert_eq!(PeerSelection::Ring.peers(1, 2, 9), [0]);
        assert_eq!(PeerSelection::Exponential.peers(3, 6, 0), [1, 4, 5]);
        assert_eq!(PeerSelection::Exponential.takers(3, 6, 0), [1, 2, 5]);
        let once = |r| PeerSelection::OnePeerExponential.peers(0, 6, r);
        assert_eq!((once(0), once(1), once(2), once(3)), (vec![1], vec![2], vec![4], vec![1]));
        for selection in PeerSelection::ALL {
            assert!(selection.peers(0, 1, 3).is_empty(), "{selection:?} alone");
        }
    }

    #[test]
    fn shift_one_refuses_odd_numbers_and_names_them() {
        let refused = PeerSelection::ShiftOne.check(5).unwrap_err().to_string();
        assert!(refused.contains("first half with one of the second half") && refused.ends_with("not 5"), "{refused}");
        PeerSelection::ShiftOne.check(1).unwrap();
        PeerSelection::ShiftOne.check(4).unwrap();
        assert!(PeerSelection::by_name("star").unwrap_err().to_string().contains("one_peer_exponential"));
    }
}
