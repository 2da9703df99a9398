use super::*;

/// Stores parameters. The answer is their version, without bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutParameters {
    /// Their name.
    pub name: String,
    /// Idempotency key: a resent put has the same number; 0 for none.
    pub id: u64,
    /// The version to store; if it is 0 or not newer than the stored one, the next version.
    pub version: u64,
    /// A safetensors file.
    pub bytes: Bytes,
}

call!(PutParameters: Learner => Option<Parameters>, names: |put, visit| visit(&mut put.name), payload: |put| put.bytes.clone());

same_fields! { put_parameters: PutParameters { name, id, version | bytes = Rest::payload } }
