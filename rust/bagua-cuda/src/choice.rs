//! Which collective the ranks of a lane choose for arrays on devices, by what each tells of itself: the same on all of them.

use bagua_core::error::{Error, Result};

use crate::device::Wish;
use crate::kernels::MAX_SOURCES;
use crate::nccl::version_text;
use crate::stage::{Choice, HIER, IPC, STAGED};

/// Name of the collective by NCCL.
pub(crate) const NCCL: &str = "nccl";

/// The oldest NCCL that lets several ranks use one device, where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
const SEVERAL: i32 = 23000;

/// Bytes that each rank tells of itself: a whole number of elements of any type.
pub(crate) const RECORD: usize = 512;

/// Where the reason begins in a record.
const REASON: usize = 32;

/// What a rank tells of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// What its caller wants.
    pub(crate) wish: Wish,
    /// The version of its NCCL, as that counts; 0 where it cannot be used.
    pub(crate) nccl: i32,
    /// `NCCL_MULTI_RANK_GPU_ENABLE=1`.
    pub(crate) several: bool,
    /// Identifier of its device.
    pub(crate) uuid: Option<[u8; 16]>,
    /// Why NCCL cannot be used, in one line.
    pub(crate) reason: String,
}

impl Candidate {
    /// For the other ranks. A reason that is too long is cut off.
    pub(crate) fn to_record(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        record[0] = self.wish as u8;
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

    /// Of a record, of [`RECORD`] bytes.
    pub(crate) fn from_record(record: &[u8]) -> Candidate {
        let bytes = |at: usize| <[u8; 16]>::try_from(&record[at..at + 16]).expect("sixteen");
        let version = <[u8; 4]>::try_from(&record[4..8]).expect("four");
        let reason = record[REASON..].split(|byte| *byte == 0).next().unwrap_or_default();
        Candidate {
            wish: Wish::ALL.get(usize::from(record[0])).copied().unwrap_or_default(),
            several: record[1] != 0,
            uuid: (record[2] != 0).then(|| bytes(8)),
            nccl: i32::from_le_bytes(version),
            reason: String::from_utf8_lossy(reason).into_owned(),
        }
    }
}

/// Where the ranks of a group are.
pub(crate) struct Hosts<'a> {
    /// The ranks of each host.
    pub(crate) ranks: &'a [Vec<usize>],
    /// The host's collective works inside hosts first, and between them then.
    pub(crate) hierarchical: bool,
}

/// What the ranks choose, as far as they know it by what each tells of itself.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This one.
    Settled(Choice),
    /// This one, if the ranks can share memory; else what [`without_ipc`] says.
    IfShared(Choice),
}

/// What all ranks choose.
///
/// # Errors
/// `Unavailable` for wishes that differ or cannot be served.
pub(crate) fn choose(candidates: &[Candidate], hosts: &Hosts<'_>) -> Result<Found> {
    let wish = candidates[0].wish;
    if let Some(rank) = candidates.iter().position(|candidate| candidate.wish != wish) {
        return Err(Error::Unavailable(format!(
            "BAGUA_CUDA_COLLECTIVE is {} on rank 0 of the group and {} on rank {rank}",
            wish.name(),
            candidates[rank].wish.name()
        )));
    }
    let nccl = match wish {
        Wish::Staged => return Ok(Found::Settled(Choice { collective: STAGED, why: wanted(wish) })),
        Wish::Ipc => None,
        Wish::Nccl | Wish::Auto => why_not_nccl(candidates, hosts.ranks),
    };
    match (wish, &nccl) {
        (Wish::Nccl, Some(reason)) => return Err(Error::Unavailable(format!("{}: {reason}", wanted(wish)))),
        (Wish::Nccl, None) => return Ok(Found::Settled(Choice { collective: NCCL, why: wanted(wish) })),
        (Wish::Auto, None) => {
            let why = format!("auto: NCCL {} on all ranks", version_text(candidates[0].nccl));
            return Ok(Found::Settled(Choice { collective: NCCL, why }));
        }
        _ => {}
    }
    let why = nccl.map_or_else(|| wanted(wish), |reason| format!("auto: {reason}"));
    if let Some(reason) = why_not_ipc(hosts) {
        return without_ipc(wish, why, &reason).map(Found::Settled);
    }
    Ok(Found::IfShared(match hosts.ranks.len() {
        1 => Choice { collective: IPC, why },
        hosts => Choice { collective: HIER, why: format!("{why}; ipc inside the {hosts} hosts, staged between") },
    }))
}

/// What the ranks choose that cannot share memory, for a `reason` that all of them know. `why` is what led to ipc.
///
/// # Errors
/// `Unavailable` where nothing else is wanted.
pub(crate) fn without_ipc(wish: Wish, why: String, reason: &str) -> Result<Choice> {
    match wish {
        Wish::Auto => Ok(Choice { collective: STAGED, why: format!("{why}; {reason}") }),
        _ => Err(Error::Unavailable(format!("{}: {reason}", wanted(wish)))),
    }
}

fn wanted(wish: Wish) -> String {
    format!("BAGUA_CUDA_COLLECTIVE={}", wish.name())
}

/// Why ranks do not even try to share memory; `None` where they do.
fn why_not_ipc(hosts: &Hosts<'_>) -> Option<String> {
    let ranks = hosts.ranks;
    if let Some(host) = ranks.iter().find(|host| host.len() > MAX_SOURCES) {
        return Some(format!("a host has {} ranks, and ipc serves up to {MAX_SOURCES}", host.len()));
    }
    if ranks.len() > 1 && ranks.iter().all(|host| host.len() == 1) {
        return Some("no two ranks of the group share a host".to_owned());
    }
    if ranks.len() > 1 && !hosts.hierarchical {
        return Some("the group's route between hosts is flat, which ipc has no way for".to_owned());
    }
    None
}

/// Why NCCL cannot be used; `None` where it can.
fn why_not_nccl(candidates: &[Candidate], hosts: &[Vec<usize>]) -> Option<String> {
    let on = |rank: usize| if candidates.len() > 1 { format!(" (rank {rank} of the group)") } else { String::new() };
    for (rank, candidate) in candidates.iter().enumerate() {
        if candidate.nccl == 0 {
            return Some(format!("{}{}", candidate.reason, on(rank)));
        }
        if candidate.nccl != candidates[0].nccl {
            let (first, other) = (version_text(candidates[0].nccl), version_text(candidate.nccl));
            return Some(format!("NCCL is {first} on rank 0 of the group and {other} on rank {rank}"));
        }
    }
    if candidates[0].nccl >= SEVERAL && candidates.iter().all(|candidate| candidate.several) {
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
        let found = choose(candidates, &hosts).map_err(|error| error.to_string())?;
        let (Found::Settled(choice) | Found::IfShared(choice)) = found;
        Ok((choice.collective, choice.why))
    }

    #[test]
    fn a_record_tells_what_a_rank_is() {
        let long = "ä".repeat(RECORD);
        let candidate = Candidate { wish: Wish::Ipc, several: true, reason: long, ..able(7) };
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
        assert_eq!((collective, &*why), ("ipc", "auto: ranks 0 and 2 of the group have the same device"));
        // The same device number on two hosts is two devices.
        assert_eq!(over(&[able(0), able(0)], &[vec![0], vec![1]]).unwrap().0, "nccl");
        let unknown = Candidate { uuid: None, ..able(0) };
        assert_eq!(on_one_host(&[unknown.clone(), able(1)]).unwrap().0, "ipc");
        assert_eq!(on_one_host(&[unknown]).unwrap().0, "nccl");
    }

    #[test]
    fn several_ranks_share_a_device_where_all_of_them_and_the_version_allow_it() {
        let sharing = |nccl| Candidate { nccl, several: true, ..able(0) };
        assert_eq!(on_one_host(&[sharing(23000), sharing(23000)]).unwrap().0, "nccl");
        assert_eq!(on_one_host(&[sharing(22999), sharing(22999)]).unwrap().0, "ipc");
        let alone = Candidate { several: false, ..sharing(23000) };
        assert_eq!(on_one_host(&[sharing(23000), alone]).unwrap().0, "ipc");
    }

    #[test]
    fn a_wish_that_cannot_be_served_says_why() {
        let wish = |wish, candidate| Candidate { wish, ..candidate };
        let none = Candidate { reason: "NCCL 2.18.3 is too old".to_owned(), ..Candidate::default() };
        let error = on_one_host(&[wish(Wish::Nccl, able(0)), wish(Wish::Nccl, none.clone())]).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=nccl: NCCL 2.18.3 is too old (rank 1 of the group)");
        assert_eq!(on_one_host(std::slice::from_ref(&none)).unwrap().1, "auto: NCCL 2.18.3 is too old");
        let newer = Candidate { nccl: 23000, ..able(1) };
        let error = on_one_host(&[wish(Wish::Nccl, able(0)), wish(Wish::Nccl, newer)]).unwrap_err();
        assert!(error.ends_with("NCCL is 2.27.3 on rank 0 of the group and 2.30.0 on rank 1"), "{error}");
        let error = on_one_host(&[able(0), able(1), wish(Wish::Staged, able(2))]).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE is auto on rank 0 of the group and staged on rank 2");
    }

    #[test]
    fn ranks_share_memory_inside_hosts_where_some_host_has_several() {
        let ipc = |count: usize| vec![Candidate { wish: Wish::Ipc, ..able(0) }; count];
        assert_eq!(on_one_host(&ipc(2)).unwrap(), ("ipc", "BAGUA_CUDA_COLLECTIVE=ipc".to_owned()));
        let (collective, why) = over(&ipc(3), &[vec![0, 1], vec![2]]).unwrap();
        let text = "BAGUA_CUDA_COLLECTIVE=ipc; ipc inside the 2 hosts, staged between";
        assert_eq!((collective, &*why), ("hier", text));
        let error = over(&ipc(2), &[vec![0], vec![1]]).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=ipc: no two ranks of the group share a host");
        let error = on_one_host(&ipc(9)).unwrap_err();
        assert_eq!(error, "BAGUA_CUDA_COLLECTIVE=ipc: a host has 9 ranks, and ipc serves up to 8");
        let flat = Hosts { ranks: &[vec![0, 1], vec![2]], hierarchical: false };
        assert!(choose(&ipc(3), &flat).unwrap_err().to_string().contains("is flat"));
    }

    #[test]
    fn what_the_ranks_take_instead_has_both_reasons() {
        let (collective, why) = on_one_host(&vec![able(0); 9]).unwrap();
        assert_eq!(collective, "staged");
        let text = "auto: ranks 0 and 1 of the group have the same device; a host has 9 ranks, and ipc serves up to 8";
        assert_eq!(why, text);
        let choice = without_ipc(Wish::Auto, "auto: one".to_owned(), "two").unwrap();
        assert_eq!((choice.collective, &*choice.why), ("staged", "auto: one; two"));
        let error = without_ipc(Wish::Ipc, String::new(), "two").unwrap_err();
        assert_eq!(error.to_string(), "BAGUA_CUDA_COLLECTIVE=ipc: two");
    }
}
