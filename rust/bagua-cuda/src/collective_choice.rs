//! The choice among collectives for arrays on devices. It depends only on one record per rank, so all ranks agree.

use bagua_core::error::{Error, Result};

use crate::device::Requested;
use crate::device_lane::{Choice, HIER, STAGED};
use crate::nccl::version_text;

pub(crate) const NCCL: &str = "nccl";

/// The oldest NCCL that lets several ranks use one device if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
const SEVERAL: i32 = 23000;

/// Size in bytes of the record that each rank sends: a whole number of elements of any type.
pub(crate) const RECORD: usize = 512;

/// Offset of the reason for not using NCCL in a record.
const REASON: usize = 32;

/// The content of a rank's record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) requested: Requested,
    /// Version number of the rank's NCCL, or 0 if NCCL cannot be used.
    pub(crate) nccl: i32,
    pub(crate) several: bool,
    pub(crate) uuid: Option<[u8; 16]>,
    /// Reason why NCCL cannot be used, in one line.
    pub(crate) reason: String,
}

impl Candidate {
    /// Encodes the record for the other ranks. A reason that is too long is cut off.
    pub(crate) fn to_record(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        record[0] = self.requested as u8;
        record[1] = self.several.into();
        record[2] = self.uuid.is_some().into();
        record[4..8].copy_from_slice(&self.nccl.to_le_bytes());
        record[8..24].copy_from_slice(&self.uuid.unwrap_or_default());
        let mut end = self.reason.len().min(RECORD - REASON);
        while !self.reason.is_char_boundary(end) {
            end -= 1;
        }
        record[REASON..REASON + end].copy_from_slice(&self.reason.as_bytes()[..end]);
        record
    }

    pub(crate) fn from_record(record: &[u8]) -> Candidate {
        let bytes = |at: usize| <[u8; 16]>::try_from(&record[at..at + 16]).expect("sixteen");
        let version = <[u8; 4]>::try_from(&record[4..8]).expect("four");
        let reason = record[REASON..].split(|byte| *byte == 0).next().unwrap_or_default();
        Candidate {
            requested: Requested::from_code(record[0]).unwrap_or_default(),
            several: record[1] != 0,
            uuid: (record[2] != 0).then(|| bytes(8)),
            nccl: i32::from_le_bytes(version),
            reason: String::from_utf8_lossy(reason).into_owned(),
        }
    }
}

pub(crate) struct Hosts<'a> {
    pub(crate) ranks: &'a [Vec<usize>],
    /// True if the host's collective works first inside hosts and then between them.
    pub(crate) hierarchical: bool,
}

/// Returns the choice of all ranks.
///
/// # Errors
/// `Unavailable` if the ranks request different collectives, or one that they cannot use.
pub(crate) fn choose(candidates: &[Candidate], hosts: &Hosts<'_>) -> Result<Choice> {
    let requested = candidates[0].requested;
    if let Some(rank) = candidates.iter().position(|candidate| candidate.requested != requested) {
        return Err(Error::Unavailable(format!(
            "BAGUA_CUDA_COLLECTIVE is {} on rank 0 of the group and {} on rank {rank}; all ranks need the same value",
            requested.name(),
            candidates[rank].requested.name()
        )));
    }
    let all: Vec<usize> = (0..candidates.len()).collect();
    let prevents = match requested {
        Requested::Staged => return Ok(Choice { collective: STAGED, why: wanted(requested) }),
        Requested::Nccl | Requested::Auto => why_not_nccl(candidates, &all, hosts.ranks),
    };
    match (prevents, requested) {
        (Some(reason), Requested::Auto) => Ok(without_one_communicator(candidates, hosts, &reason)),
        (Some(reason), _) => Err(Error::Unavailable(format!("{}: {reason}", wanted(requested)))),
        (None, Requested::Auto) => {
            let why = format!("auto: NCCL {} on all ranks", version_text(candidates[0].nccl));
            Ok(Choice { collective: NCCL, why })
        }
        (None, _) => Ok(Choice { collective: NCCL, why: wanted(requested) }),
    }
}

/// Returns the automatic choice of ranks that one NCCL communicator cannot serve. `reason` says why not.
fn without_one_communicator(candidates: &[Candidate], hosts: &Hosts<'_>, reason: &str) -> Choice {
    let why = format!("auto: {reason}");
    let several = || hosts.ranks.iter().filter(|host| host.len() > 1);
    let number = hosts.ranks.len();
    if number == 1 || several().next().is_none() {
        return Choice { collective: STAGED, why };
    }
    if !hosts.hierarchical {
        let why = format!("{why}; the group's route between hosts is flat, so NCCL serves no host alone");
        return Choice { collective: STAGED, why };
    }
    match several().find_map(|host| why_not_nccl(candidates, host, std::slice::from_ref(host))) {
        None => {
            let why = format!("{why}; nccl inside the {number} hosts, staged between");
            Choice { collective: HIER, why }
        }
        // A host's reason may be the same as the reason for all ranks. Then it is not repeated.
        Some(same) if same == reason => Choice { collective: STAGED, why },
        Some(other) => Choice { collective: STAGED, why: format!("{why}; {other}") },
    }
}

fn wanted(requested: Requested) -> String {
    format!("BAGUA_CUDA_COLLECTIVE={}", requested.name())
}

/// Returns the reason why NCCL cannot serve these ranks, which are on `hosts`, or `None` if it can.
fn why_not_nccl(candidates: &[Candidate], ranks: &[usize], hosts: &[Vec<usize>]) -> Option<String> {
    let on = |rank: usize| if candidates.len() > 1 { format!(" (rank {rank} of the group)") } else { String::new() };
    let first = ranks[0];
    let version = candidates[first].nccl;
    for rank in ranks {
        let candidate = &candidates[*rank];
        if candidate.nccl == 0 {
            return Some(format!("{}{}", candidate.reason, on(*rank)));
        }
        if candidate.nccl != version {
            let (one, other) = (version_text(version), version_text(candidate.nccl));
            return Some(format!("NCCL is {one} on rank {first} of the group and {other} on rank {rank}"));
        }
    }
    if version >= SEVERAL && ranks.iter().all(|rank| candidates[*rank].several) {
        return None;
    }
    for host in hosts {
        for (at, rank) in host.iter().enumerate() {
            if candidates[*rank].uuid.is_none() && host.len() > 1 {
                return Some(format!("the driver does not identify the device of rank {rank} of the group"));
            }
            let twin = host[..at].iter().find(|other| candidates[**other].uuid == candidates[*rank].uuid);
            if let Some(other) = twin {
                return Some(format!("ranks {other} and {rank} of the group have the same device"));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn able(device: u8) -> Candidate {
        Candidate { nccl: 22703, uuid: Some([device; 16]), ..Candidate::default() }
    }

    fn on_one_host(candidates: &[Candidate]) -> std::result::Result<(&'static str, String), String> {
        over(candidates, &[(0..candidates.len()).collect()])
    }

    fn over(candidates: &[Candidate], ranks: &[Vec<usize>]) -> std::result::Result<(&'static str, String), String> {
        let hosts = Hosts { ranks, hierarchical: ranks.len() > 1 };
        let chosen = choose(candidates, &hosts).map_err(|error| error.to_string())?;
        Ok((chosen.collective, chosen.why))
    }

    #[test]
    fn a_record_says_what_a_rank_has() {
        let long = "ä".repeat(RECORD);
        let candidate = Candidate { requested: Requested::Staged, several: true, reason: long, ..able(7) };
        let read = Candidate::from_record(&candidate.to_record());
        assert!(candidate.reason.starts_with(&read.reason) && read.reason.len() == RECORD - REASON);
        assert_eq!(read, Candidate { reason: read.reason.clone(), ..candidate });
        let plain = Candidate { reason: "why".to_owned(), ..Candidate::default() };
        assert_eq!(Candidate::from_record(&plain.to_record()), plain);
    }

    #[test]
    fn auto_takes_nccl_where_each_rank_has_a_device_of_its_own() {
        assert_eq!(on_one_host(&[able(0), able(1)]).unwrap(), ("nccl", "auto: NCCL 2.27.3 on all ranks".to_owned()));
        let (collective, why) = on_one_host(&[able(0), able(1), able(0)]).unwrap();
        assert_eq!((collective, &*why), ("staged", "auto: ranks 0 and 2 of the group have the same device"));
        // The same device number on two hosts stands for two devices.
        assert_eq!(over(&[able(0), able(0)], &[vec![0], vec![1]]).unwrap().0, "nccl");
        let unknown = Candidate { uuid: None, ..able(0) };
        assert_eq!(on_one_host(&[unknown.clone(), able(1)]).unwrap().0, "staged");
        assert_eq!(on_one_host(&[unknown]).unwrap().0, "nccl");
    }

    #[test]
    fn several_ranks_share_a_device_where_all_of_them_and_the_version_allow_it() {
        let sharing = |nccl| Candidate { nccl, several: true, ..able(0) };
        assert_eq!(on_one_host(&[sharing(23000), sharing(23000)]).unwrap().0, "nccl");
        assert_eq!(on_one_host(&[sharing(22999), sharing(22999)]).unwrap().0, "staged");
        let alone = Candidate { several: false, ..sharing(23000) };
        assert_eq!(on_one_host(&[sharing(23000), alone]).unwrap().0, "staged");
    }

    #[test]
    fn a_requested_collective_that_cannot_be_used_is_an_error_with_its_reason() {
        let requesting = |requested, candidate| Candidate { requested, ..candidate };
        let none = Candidate { reason: "NCCL 2.18.3 is too old".to_owned(), ..Candidate::default() };
        let error = on_one_host(&[requesting(Requested::Nccl, able(0)), requesting(Requested::Nccl, none.clone())])
            .unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=nccl: NCCL 2.18.3 is too old (rank 1 of the group)");
        assert_eq!(on_one_host(std::slice::from_ref(&none)).unwrap().1, "auto: NCCL 2.18.3 is too old");
        let newer = Candidate { nccl: 23000, ..able(1) };
        let error =
            on_one_host(&[requesting(Requested::Nccl, able(0)), requesting(Requested::Nccl, newer)]).unwrap_err();
        assert!(error.ends_with("NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 1"), "{error}");
        let error = on_one_host(&[able(0), able(1), requesting(Requested::Staged, able(2))]).unwrap_err();
        let text =
            "BAGUA_CUDA_COLLECTIVE is auto on rank 0 of the group and staged on rank 2; all ranks need the same value";
        assert_eq!(error, text);
    }

    const TWO_AND_TWO: [[usize; 2]; 2] = [[0, 1], [2, 3]];

    /// Returns true if the ranks of two hosts with two ranks each choose NCCL inside hosts, and the reason.
    fn inside_hosts(candidates: &[Candidate]) -> (bool, String) {
        let (collective, why) = over(candidates, &TWO_AND_TWO.map(Vec::from)).unwrap();
        assert!(["hier", "staged"].contains(&collective), "{collective}");
        (collective == "hier", why)
    }

    fn versions(versions: [i32; 4]) -> Vec<Candidate> {
        let of = |(rank, nccl): (usize, i32)| Candidate { nccl, ..able(rank as u8 % 2) };
        versions.into_iter().enumerate().map(of).collect()
    }

    #[test]
    fn nccl_serves_inside_hosts_what_has_one_version_on_each_of_them() {
        let mixed = versions([22703, 22703, 23000, 23000]);
        let against = "auto: NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 2";
        let text = format!("{against}; nccl inside the 2 hosts, staged between");
        assert_eq!(inside_hosts(&mixed), (true, text));
        let text = "auto: NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 3; \
            NCCL is 2.27.3 on rank 2 of the group and 2.30.0 on rank 3";
        assert_eq!(inside_hosts(&versions([22703, 22703, 22703, 23000])), (false, text.to_owned()));
        let mut absent = mixed.clone();
        absent[3] = Candidate { reason: "gone".to_owned(), ..Candidate::default() };
        assert_eq!(inside_hosts(&absent), (false, format!("{against}; gone (rank 3 of the group)")));
        let flat = Hosts { ranks: &TWO_AND_TWO.map(Vec::from), hierarchical: false };
        let chosen = choose(&mixed, &flat).unwrap();
        assert!(chosen.collective == STAGED && chosen.why.contains("is flat"), "{chosen:?}");
    }

    #[test]
    fn nccl_inside_hosts_needs_a_device_for_each_rank_of_a_host_or_a_version_that_shares_them() {
        let mut twins = versions([22703, 22703, 23000, 23000]);
        twins[3].uuid = twins[2].uuid;
        let (inside, why) = inside_hosts(&twins);
        assert!(!inside && why.ends_with("; ranks 2 and 3 of the group have the same device"), "{why}");
        (twins[2].several, twins[3].several) = (true, true);
        assert!(inside_hosts(&twins).0);
        // Versions must agree inside a host, but may differ between hosts.
        (twins[2].nccl, twins[3].nccl) = (22900, 22900);
        assert!(!inside_hosts(&twins).0);
    }

    #[test]
    fn a_rank_that_is_alone_on_its_host_needs_no_nccl() {
        let mut ranks = versions([22703, 22703, 22703, 22703]);
        ranks.truncate(3);
        ranks[2] = Candidate { reason: "gone".to_owned(), ..Candidate::default() };
        assert_eq!(over(&ranks, &[vec![0, 1], vec![2]]).unwrap().0, "hier");
        assert_eq!(over(&ranks, &[vec![0], vec![1], vec![2]]).unwrap().0, "staged");
    }

    #[test]
    fn a_reason_that_holds_for_all_ranks_and_inside_a_host_is_named_once() {
        let mut twins = versions([22703; 4]);
        twins[1].uuid = twins[0].uuid;
        let text = "auto: ranks 0 and 1 of the group have the same device";
        assert_eq!(inside_hosts(&twins), (false, text.to_owned()));
    }

    #[test]
    fn requesting_nccl_is_an_error_where_nccl_works_inside_hosts_only() {
        let mut mixed = versions([22703, 22703, 23000, 23000]);
        mixed.iter_mut().for_each(|candidate| candidate.requested = Requested::Nccl);
        let error = over(&mixed, &TWO_AND_TWO.map(Vec::from)).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=nccl: NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 2");
    }
}
