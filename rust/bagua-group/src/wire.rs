//! The encoding of all messages of the control plane, the rendezvous, the store and joining.
//!
//! Messages are structs and enums that serde and postcard encode into bounded frames. Each message implements
//! [`Encoding`].
//!
//! Received bytes are untrusted: every length is checked against the bytes that are there, and no input causes a panic.
//! The handshake has a fixed layout, written by [`Writer`] and read by [`Reader`], because ends with different versions
//! must understand it.

use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::time::Duration;

use serde::de::{self, DeserializeOwned, Error as _, SeqAccess};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::error::{DeviceFailure, Error, Progress, Source};

/// Version of the protocol of addresses, handshakes, control messages and rendezvous.
pub const VERSION: u16 = 16;

/// Maximum length of a frame on a control connection.
pub(super) const FRAME_LIMIT: usize = 64 * 1024;

/// Maximum length of a text in a message. An error has up to four texts, which fit into a frame.
pub(super) const TEXT_LIMIT: usize = 12 * 1024;

/// Maximum number of ranks that an encoded error names.
pub(super) const RANKS_LIMIT: usize = 2048;

/// Maximum number of ranks whose addresses are exchanged in one list.
pub(super) const WORLD_LIMIT: usize = 1 << 20;

/// Highest number of a view that is accepted from another rank. Each failure adds one, so no job gets there. A number
/// near the end of its type would overflow.
pub(super) const VIEWS_LIMIT: u64 = 1 << 48;

/// Bytes that cannot be parsed. The text says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Appends values in little-endian order.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn u8(&mut self, value: u8) -> &mut Writer {
        self.0.push(value);
        self
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Writer {
        self.fixed(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Writer {
        self.fixed(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Writer {
        self.fixed(&value.to_le_bytes())
    }

    /// Appends a rank or a count of ranks.
    pub(super) fn rank(&mut self, value: usize) -> &mut Writer {
        self.u32(u32::try_from(value).unwrap_or(u32::MAX))
    }

    /// Appends bytes without their length, which the reader knows.
    pub(super) fn fixed(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// Parses values in the order in which they were appended.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed("it is truncated"))?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn rank(&mut self) -> Result<usize, Malformed> {
        usize::try_from(self.u32()?).map_err(|_| Malformed("a number is out of range"))
    }
}

/// A message: a type that serde encodes, with the limits that the type cannot express.
///
/// postcard writes numbers and lengths with as many bytes as they need, and no names of fields, so both ends must have
/// the same [`VERSION`]. A number may be read from more bytes than it needs, so two bodies may be the same message.
/// This does no harm, because nothing compares or authenticates bodies as bytes.
///
/// An element of a list may be 1 byte in a body and 24 bytes in memory. Therefore each list of anything but bytes must
/// be an [`AtMost`], [`Ranks`], [`BytesOf`] or [`Texts`].
pub(super) trait Encoding: Serialize + DeserializeOwned {
    /// Checks the limits of a decoded message.
    fn check(&self) -> Result<(), Malformed> {
        Ok(())
    }

    fn encode(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("every list has a length")
    }

    /// Returns the message as a frame, which starts with the length of its body.
    fn frame(&self) -> Vec<u8> {
        framed(&self.encode())
    }

    fn parse(body: &[u8]) -> Result<Self, Malformed> {
        let (message, rest) = postcard::take_from_bytes::<Self>(body).map_err(|why| match why {
            postcard::Error::DeserializeUnexpectedEnd => Malformed("it is truncated"),
            postcard::Error::DeserializeBadUtf8 => Malformed("a text is not UTF-8"),
            postcard::Error::DeserializeBadBool | postcard::Error::DeserializeBadOption => {
                Malformed("a flag is neither 0 nor 1")
            }
            postcard::Error::DeserializeBadVarint => Malformed("a number is out of range"),
            // A value that the modules below refuse, or an enum variant that does not exist.
            _ => Malformed("it has an unknown kind, or a value beyond its limit"),
        })?;
        if !rest.is_empty() {
            return Err(Malformed("it has trailing bytes"));
        }
        message.check()?;
        Ok(message)
    }
}

/// Returns a frame: the length of a body, then the body.
pub(super) fn framed(body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
    [&len.to_le_bytes()[..], body].concat()
}

/// Checks the number of a view.
pub(super) fn check_view(view: u64) -> Result<(), Malformed> {
    if view > VIEWS_LIMIT { Err(Malformed("the number of a view is out of range")) } else { Ok(()) }
}

/// A text. A longer text than [`TEXT_LIMIT`] is truncated when it is written. When read it is malformed, because it
/// would lose its end when it is sent on.
pub(super) mod text {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&text[..limit(text)])
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        let text = <&str>::deserialize(from)?;
        if text.len() > TEXT_LIMIT { Err(D::Error::custom("a text is too long")) } else { Ok(text.to_owned()) }
    }

    /// Returns the index at which to truncate a text. The oldest supported compiler lacks `str::floor_char_boundary`.
    fn limit(text: &str) -> usize {
        (0..=TEXT_LIMIT.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
    }
}

/// A text that many values share in memory. It has the encoding of [`text`].
pub(super) mod shared_text {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(text: &Arc<str>, to: S) -> Result<S::Ok, S::Error> {
        text::serialize(text, to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
        text::deserialize(from).map(Arc::from)
    }
}

/// A rank or a count of ranks, with a limit so that another rank cannot make a sum overflow.
pub(super) mod rank {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(rank: &usize, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(u32::try_from(*rank).unwrap_or(u32::MAX))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
        Ok(u32::deserialize(from)? as usize)
    }
}

/// A list of at most `N` elements, used as `#[serde(with = "AtMost::<N>")]`. A longer list is refused before memory is
/// allocated for it. So is a list that claims to have more elements than there are bytes behind its length.
pub(super) struct AtMost<const N: usize>;

impl<const N: usize> AtMost<N> {
    pub(super) fn serialize<T: Serialize, S: Serializer>(list: &[T], to: S) -> Result<S::Ok, S::Error> {
        list.serialize(to)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
        struct Elements<T, const N: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const N: usize> de::Visitor<'de> for Elements<T, N> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {N} elements")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<T>, A::Error> {
                // postcard gives no size hint if the length exceeds the remaining bytes.
                let len =
                    from.size_hint().filter(|len| *len <= N).ok_or_else(|| A::Error::custom("a list is too long"))?;
                let mut list = Vec::with_capacity(len);
                while let Some(element) = from.next_element()? {
                    list.push(element);
                }
                Ok(list)
            }
        }

        from.deserialize_seq(Elements::<T, N>(PhantomData))
    }
}

/// A list of ranks. When written, it is truncated to `N`. See [`AtMost`] and [`rank`].
pub(super) struct Ranks<const N: usize>;

#[derive(Serialize, Deserialize)]
struct Rank(#[serde(with = "rank")] usize);

impl<const N: usize> Ranks<N> {
    pub(super) fn serialize<S: Serializer>(ranks: &[usize], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(ranks.iter().take(N).copied().map(Rank))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<usize>, D::Error> {
        Ok(AtMost::<N>::deserialize::<Rank, D>(from)?.into_iter().map(|rank| rank.0).collect())
    }
}

/// A list of texts. When written, it is truncated to `N`. See [`AtMost`] and [`text`].
pub(super) struct Texts<const N: usize>;

#[derive(Serialize, Deserialize)]
struct Text(#[serde(with = "text")] String);

impl<const N: usize> Texts<N> {
    pub(super) fn serialize<S: Serializer>(texts: &[String], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(texts.iter().take(N).cloned().map(Text))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        Ok(AtMost::<N>::deserialize::<Text, D>(from)?.into_iter().map(|text| text.0).collect())
    }
}

/// Bytes in one piece, used as `#[serde(with = "bytes")]`. Without it, serde would write and read a `Vec<u8>` byte by
/// byte, to the same encoding.
pub(super) mod bytes {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        <&[u8]>::deserialize(from).map(<[u8]>::to_vec)
    }
}

/// A list of lists of bytes; see [`AtMost`] and [`bytes`].
pub(super) struct BytesOf<const N: usize>;

#[derive(Serialize)]
struct Borrowed<'a>(#[serde(with = "bytes")] &'a [u8]);

#[derive(Deserialize)]
struct Owned(#[serde(with = "bytes")] Vec<u8>);

impl<const N: usize> BytesOf<N> {
    pub(super) fn serialize<S: Serializer>(list: &[Vec<u8>], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(list.iter().map(|bytes| Borrowed(bytes)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<u8>>, D::Error> {
        Ok(AtMost::<N>::deserialize::<Owned, D>(from)?.into_iter().map(|bytes| bytes.0).collect())
    }
}

/// A socket address or none. Keeps the zone of a link-local address, which serde's own encoding loses.
pub(super) mod socket {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Parts(IpAddr, u16, u32);

    /// A `SocketAddr` or an `Option<SocketAddr>`, so that one module encodes both.
    pub(in super::super) trait Sockets: Sized {
        fn get(&self) -> Option<SocketAddr>;
        fn new(socket: Option<SocketAddr>) -> Option<Self>;
    }

    impl Sockets for SocketAddr {
        fn get(&self) -> Option<SocketAddr> {
            Some(*self)
        }

        fn new(socket: Option<SocketAddr>) -> Option<SocketAddr> {
            socket
        }
    }

    impl Sockets for Option<SocketAddr> {
        fn get(&self) -> Option<SocketAddr> {
            *self
        }

        fn new(socket: Option<SocketAddr>) -> Option<Option<SocketAddr>> {
            Some(socket)
        }
    }

    pub(in super::super) fn serialize<T: Sockets, S: Serializer>(socket: &T, to: S) -> Result<S::Ok, S::Error> {
        let zone = |socket| if let SocketAddr::V6(v6) = socket { SocketAddrV6::scope_id(&v6) } else { 0 };
        socket.get().map(|socket| Parts(socket.ip(), socket.port(), zone(socket))).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, T: Sockets, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        let socket = Option::<Parts>::deserialize(from)?.map(|Parts(ip, port, zone)| match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, port),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, zone).into(),
        });
        T::new(socket).ok_or_else(|| D::Error::custom("a socket address is missing"))
    }
}

/// An error, without the operating system's error that caused it. Its parts are truncated so that it fits into a frame.
pub(super) mod cause {
    use super::*;

    /// The fields of an [`Error`], as they are encoded.
    #[derive(Serialize, Deserialize)]
    #[serde(remote = "Error")]
    enum Cause {
        PeerLost {
            #[serde(with = "rank")]
            rank: usize,
            #[serde(with = "text")]
            host: String,
            #[serde(with = "text")]
            reason: String,
            #[serde(with = "rank")]
            noticed_by: usize,
            #[serde(with = "progress")]
            progress: Option<Box<Progress>>,
            #[serde(skip)]
            source: Source,
        },
        Timeout {
            after: Duration,
            #[serde(with = "Ranks::<RANKS_LIMIT>")]
            missing: Vec<usize>,
            #[serde(with = "rank")]
            noticed_by: usize,
            #[serde(with = "progress")]
            progress: Option<Box<Progress>>,
        },
        PeerRaised {
            #[serde(with = "rank")]
            rank: usize,
            #[serde(with = "text")]
            host: String,
            #[serde(with = "text")]
            kind: String,
            #[serde(with = "text")]
            message: String,
        },
        Mismatch(#[serde(with = "text")] String),
        Aborted(#[serde(with = "text")] String),
        InvalidArgument(#[serde(with = "text")] String),
        UnsupportedType(#[serde(with = "text")] String),
        NotImplemented(#[serde(with = "text")] String),
        System {
            #[serde(with = "text")]
            message: String,
            #[serde(skip)]
            source: Source,
        },
        // Peers get `Device` and `Unavailable` as `PeerRaised`, see `Plane::register`.
        #[serde(skip)]
        Device(Box<DeviceFailure>),
        #[serde(skip)]
        Unavailable(String),
    }

    pub(in super::super) fn serialize<S: Serializer>(error: &Error, to: S) -> Result<S::Ok, S::Error> {
        match error {
            Error::Device(_) | Error::Unavailable(_) => Cause::serialize(&Error::other(error.to_string()), to),
            other => Cause::serialize(other, to),
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Error, D::Error> {
        Cause::deserialize(from)
    }

    mod progress {
        use super::*;

        #[derive(Serialize, Deserialize)]
        struct Parts(#[serde(with = "text")] String, #[serde(with = "text")] String, u64, u64);

        pub(super) fn serialize<S: Serializer>(progress: &Option<Box<Progress>>, to: S) -> Result<S::Ok, S::Error> {
            let parts = progress
                .as_deref()
                .cloned()
                .map(|Progress { what, label, done, total }| Parts(what, label, done, total));
            parts.serialize(to)
        }

        pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Box<Progress>>, D::Error> {
            let parts = Option::<Parts>::deserialize(from)?;
            Ok(parts.map(|Parts(what, label, done, total)| Box::new(Progress { what, label, done, total })))
        }
    }
}

/// Reads the body of one frame. A length above `limit` is `InvalidData`, before any memory is allocated for the body.
pub(super) async fn read_frame(from: &mut (impl AsyncRead + Unpin), limit: usize) -> std::io::Result<Vec<u8>> {
    let len = usize::try_from(from.read_u32_le().await?).unwrap_or(usize::MAX);
    if len > limit {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "a frame longer than the limit"));
    }
    let mut body = vec![0; len];
    from.read_exact(&mut body).await?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_address_keeps_its_zone() {
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        struct At(#[serde(with = "socket")] SocketAddr, #[serde(with = "socket")] Option<SocketAddr>);
        impl Encoding for At {}
        for text in ["10.0.0.1:80", "[::1]:80", "[fe80::1%3]:29500"] {
            let at = text.parse().unwrap();
            for all in [At(at, None), At(at, Some(at))] {
                assert_eq!(At::parse(&all.encode()), Ok(all));
            }
        }
        assert!(At::parse(&[0, 0]).is_err(), "an address that must be there");
    }
}
