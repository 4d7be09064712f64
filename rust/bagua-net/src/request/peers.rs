//! Peer selection for decentralized averaging: which members average with each other.
//!
//! Sources: Lian et al., NeurIPS 2017 (arXiv:1705.09056) for decentralized training; Assran et al., ICML 2019
//! (arXiv:1811.10792) and Ying et al., NeurIPS 2021 (arXiv:2110.13363) for exponential graphs. The `shift_one` pairs
//! are those of the original Bagua.

use bagua_kernels::coded;

use crate::error::{Error, Result};

coded! {
    /// The members whose weights a member averages with its own. n is the number of members, i a member, r the round.
    PeerSelection {
        /// All members.
        All = 0, "all";
        /// One member of the other half, a different one in each round. Pairs are mutual. n must be even or 1.
        ShiftOne = 1, "shift_one";
        /// Members i - 1 and i + 1.
        Ring = 2, "ring";
        /// Members i + 2^j for all 2^j < n.
        Exponential = 3, "exponential";
        /// One member of `Exponential` in each round, in turn: member i + 2^(r mod ceil(log2 n)).
        OnePeerExponential = 4, "one_peer_exponential";
    }
}

impl PeerSelection {
    /// Checks that the selection works with this number of members.
    ///
    /// # Errors
    /// `InvalidArgument` for `shift_one` with an odd number of members above 1.
    pub fn check(self, members: usize) -> Result<()> {
        if self == PeerSelection::ShiftOne && members > 1 && members % 2 == 1 {
            return Err(Error::InvalidArgument(format!(
                "shift_one pairs each member of the first half with one of the second half, so it needs an even \
                 number of members, not {members}"
            )));
        }
        Ok(())
    }

    /// Returns the members whose weights member `i` of `n` averages with its own in round `r`, ascending.
    pub fn peers(self, i: usize, n: usize, r: u64) -> Vec<usize> {
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

    /// Returns the members that average the weights of member `i` with their own, ascending.
    pub fn takers(self, i: usize, n: usize, r: u64) -> Vec<usize> {
        (0..n).filter(|member| self.peers(*member, n, r).contains(&i)).collect()
    }
}

fn powers(n: usize) -> impl Iterator<Item = usize> {
    (0..usize::BITS).map(|j| 1usize << j).take_while(move |power| *power < n)
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
        assert!(
            PeerSelection::by_name("peer selection mode", "star")
                .unwrap_err()
                .to_string()
                .contains("one_peer_exponential")
        );
    }
}
