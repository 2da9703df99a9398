use super::*;

/// Stores parameters. The answer is their version, without bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutParameters {
    /// Their name.
    pub name: String,
    /// Number of the put, the same when it is sent again; 0 is none.
    pub id: u64,
    /// The version to store; the next one for 0, or where that is not newer.
    pub version: u64,
    /// A safetensors file.
    pub bytes: Bytes,
}

call!(PutParameters: Learner => Option<Parameters>, payload: |put| put.bytes.clone());

same_fields! { put_parameters: PutParameters { name, id, version | bytes = Rest::payload } }
