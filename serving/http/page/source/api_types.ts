/** Made of /openapi.json by tests/serving/http/page/write_api_types.py; do not edit. */

export interface Replies {
  "GET /api/2.0/account": AccountInfo;
  "GET /api/2.0/audit": AuditPage;
  "GET /api/2.0/endpoints/": DeploymentEndpoints;
  "GET /api/2.0/keys": KeyList;
  "POST /api/2.0/keys": NewKey;
  "GET /api/2.0/limits": LimitList;
  "PUT /api/2.0/limits": ChangedLimits;
  "GET /api/2.0/prices": PriceList;
  "PUT /api/2.0/prices": ChangedPrice;
  "GET /api/2.0/prompts": PromptList;
  "GET /api/2.0/prompts/{name}": PromptDetails;
  "GET /api/2.0/requests": RecentRequests;
  "GET /api/2.0/serving-endpoints": EndpointInfos;
  "GET /api/2.0/serving-endpoints/{name}/payloads": PayloadPage;
  "GET /api/2.0/serving-endpoints/{name}/served-models/{served}/build-logs": EngineLogs;
  "GET /api/2.0/usage": UsagePageInfo | Bill;
  "GET /health": ServerHealth;
  "GET /v1/batches": BatchList;
  "POST /v1/batches": BatchObject;
  "GET /v1/files": FileList;
  "POST /v1/files": FileObject;
  "GET /v1/models": ModelList | ModelPage;
  "POST /v1/chat/completions": ChatCompletion | ChatChunk;
  "POST /v1/completions": TextCompletion | TextChunk;
  "POST /v1/embeddings": EmbeddingList;
}

/** A key, what is left of its limits, and its prices; `endpoints` of null are all. */
export interface AccountInfo {
  key_id: string | null;
  tenant: string;
  scopes: string[];
  endpoints: string[] | null;
  keys: KeyInfo[];
  currency: string;
  limits: LimitLeftInfo[];
  prices: PriceNow[];
}

/** An adapter that was loaded at run time, as one gateway has it; `message` says why an engine refused it, or why its files could not be fetched from the database yet. */
export interface AdapterState {
  name: string;
  state: "LOADED" | "LOADING" | "REFUSED";
  content_hash?: string;
  message?: string;
}

/** A token, its log probability and its bytes. */
export interface AlternativeToken {
  token: string;
  logprob: number | null;
  bytes: number[];
}

/** One change. `before` and `after` are the state of its object, None if it did not or does not exist. */
export interface AuditEntry {
  id: number;
  at_ms: number;
  actor: string;
  tenant: string | null;
  via: string;
  request_id: string | null;
  action: string;
  target: string;
  before: unknown;
  after: unknown;
}

/** A page of the audit log. A `next_cursor` of null means that this is the last page so far. */
export interface AuditPage {
  audit: AuditEntry[];
  next_cursor: string | null;
}

/** A page of batches, the newest first. */
export interface BatchList {
  object: "list";
  data: BatchObject[];
  first_id: string | null;
  last_id: string | null;
  has_more: boolean;
}

/** A batch. */
export interface BatchObject {
  id: string;
  object: "batch";
  endpoint: string;
  errors: LineErrors | null;
  input_file_id: string;
  completion_window: string;
  status: "validating" | "in_progress" | "finalizing" | "completed" | "failed" | "expired" | "cancelling" | "cancelled";
  output_file_id: string | null;
  error_file_id: string | null;
  created_at: number;
  in_progress_at: number | null;
  expires_at: number;
  finalizing_at: number | null;
  completed_at: number | null;
  failed_at: number | null;
  expired_at: number | null;
  cancelling_at: number | null;
  cancelled_at: number | null;
  request_counts: RequestCounts;
  usage?: BatchUsage;
  metadata: Record<string, string> | null;
}

/** The tokens of all answered requests of a batch. */
export interface BatchUsage {
  input_tokens: number;
  input_tokens_details: CachedTokens;
  output_tokens: number;
  output_tokens_details: ReasoningTokens;
  total_tokens: number;
}

/** The sums by the columns of `by`, and reserved throughput. */
export interface Bill {
  currency: string;
  usage: UsageSumInfo[];
  provisioned: ReservedInfo[];
}

/** The prompt tokens that were found in the prefix cache. */
export interface CachedTokens {
  cached_tokens: number;
}

/** A custom tool and its input. */
export interface CalledCustomTool {
  name: string;
  input: string;
}

export interface CalledCustomToolDelta {
  name?: string;
  input: string;
}

/** A function and its arguments, as JSON in a string. */
export interface CalledFunction {
  name: string;
  arguments: string;
}

export interface CalledFunctionDelta {
  name?: string;
  arguments: string;
}

/** The settings of the canary of an entity that follows an alias. Without them, the entity moves at once. Attributes: traffic_percentage: percent of the entity's traffic that the new version gets while it is judged. duration_s: seconds after which the new version gets all of the traffic, unless a bound is broken before. min_requests: requests that are counted before a bound on errors or latency is judged; the canary also lasts until there are so many. max_error_rate: share of the requests that may fail (status 500 and above); null for no bound. max_ttft_p95_s: seconds within which 95 % of the streamed requests must get their first token. max_tpot_p95_s: seconds per token that 95 % of the streamed requests must keep to. min_scores: lower bounds of metrics that MLflow has of the version's logged model or run. */
export interface Canary {
  traffic_percentage: number;
  duration_s: number;
  min_requests: number;
  max_error_rate: number | null;
  max_ttft_p95_s: number | null;
  max_tpot_p95_s: number | null;
  /** at most 20 names of metrics, each with a number */
  min_scores: Record<string, number>;
}

export interface ChangedLimits {
  currency: string;
  limits: LimitInfo[];
  /** likely mistakes */
  notes: string[];
}

export interface ChangedPrice {
  currency: string;
  price: PriceInfo;
  /** likely mistakes */
  notes: string[];
}

export interface ChatChoice {
  index: number;
  message: ChatMessage;
  logprobs: ChatLogprobs | null;
  finish_reason: "stop" | "length" | "tool_calls" | "content_filter";
}

/** The data of an event of a streamed chat. `usage` is there if the request or the route asks for it. */
export interface ChatChunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  choices: ChatChunkChoice[];
  usage?: CompletionUsage | null;
}

export interface ChatChunkChoice {
  index: number;
  delta: ChatDelta;
  logprobs: ChatLogprobs | null;
  finish_reason: "stop" | "length" | "tool_calls" | "content_filter" | null;
}

/** The reply to a chat. */
export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: ChatChoice[];
  usage: CompletionUsage;
}

export interface ChatDelta {
  role?: "assistant";
  content?: string;
  reasoning_content?: string;
  tool_calls?: (FunctionCallDelta | CustomCallDelta)[];
}

export interface ChatLogprobs {
  content: ScoredToken[];
  refusal: null;
}

/** A message of the assistant, which a client may send back. `content` is null beside calls without a text. */
export interface ChatMessage {
  role: "assistant";
  content: string | null;
  reasoning_content?: string;
  tool_calls?: (FunctionCall | CustomCall)[];
}

/** The parts of the completion tokens that apply. The tokens of drafts are not billed. */
export interface CompletionTokensDetails {
  reasoning_tokens?: number;
  accepted_prediction_tokens?: number;
  rejected_prediction_tokens?: number;
  draft_tokens?: number;
  accepted_draft_tokens?: number;
}

/** The counted tokens of a request. */
export interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details?: PromptTokensDetails;
  completion_tokens_details?: CompletionTokensDetails;
}

/** A configuration: entities, their shares of the traffic, and the endpoint's own settings. */
export interface ConfigInfo {
  served_entities: ServedEntityInfo[];
  served_models: ServedModelInfo[];
  traffic_config: TrafficInfo;
  prefix_sharing?: "tenant" | "endpoint" | "off";
  payload_log?: PayloadLog;
  guardrails?: Guardrails;
  openAiSupport?: string | null;
  fullTextEnabled?: boolean | null;
  maxIterTimes?: number | null;
  maxSeqLen?: number | null;
  maxInputTokenLen?: number | null;
  maxPrefillTokens?: number | null;
  generateProfile?: "seed" | "current" | null;
  generateEndText?: boolean | null;
  allowedLocalMediaPath?: string | null;
  allowedMediaDomains?: string[] | null;
  embeddingTokenIds?: boolean | null;
  config_version: number;
  start_time?: number;
}

export interface CustomCall {
  id: string;
  type: "custom";
  custom: CalledCustomTool;
}

/** A piece of a call of a custom tool. */
export interface CustomCallDelta {
  index: number;
  id?: string;
  type?: "custom";
  custom: CalledCustomToolDelta;
}

/** An endpoint in the form of MLflow's deployments server. */
export interface DeploymentEndpoint {
  name: string;
  endpoint_type: "llm/v1/chat" | "llm/v1/completions" | "llm/v1/embeddings" | "llm/v1/score";
  model: ServedModelName;
  endpoint_url: string;
  limit: null;
}

export interface DeploymentEndpoints {
  endpoints: DeploymentEndpoint[];
  next_page_token: null;
}

export interface DeploymentState {
  deployment: "DEPLOYMENT_READY" | "DEPLOYMENT_CREATING";
  deployment_state_message: string;
}

/** A vector: a list of numbers or, with `encoding_format` `base64`, little-endian float32 in base64. */
export interface Embedding {
  object: "embedding";
  index: number;
  embedding: number[] | string;
}

/** The vectors of the inputs, in their order. Databricks' and MLflow's routes give them an id. */
export interface EmbeddingList {
  id?: string;
  object: "list";
  data: Embedding[];
  model: string;
  usage: PromptUsage;
}

/** The state of an endpoint: its worst entity's, with the work of all; several entities are listed too. Shadows do not count towards it; callers who manage see theirs. */
export interface EndpointHealth {
  status: "starting" | "ready" | "draining" | "stalled" | "dead";
  steps?: number;
  last_step_age?: number;
  running?: number;
  waiting?: number;
  cpu_wait?: number;
  processor_wait?: number;
  kernels?: string;
  kernels_reason?: string;
  instruction_set?: string;
  quantization?: string;
  quantization_reason?: string;
  kv_cache_dtype?: string;
  kv_cache_reason?: string;
  max_num_batched_tokens?: number;
  paged?: PagedInfo;
  standbys?: number;
  memory?: number;
  unloaded?: string;
  start_seconds?: number | null;
  entities?: Record<string, EntityHealth>;
  shadows?: Record<string, EntityHealth>;
}

/** An endpoint. Callers who do not manage see no configuration, tags, limits, messages or creator. */
export interface EndpointInfo {
  name: string;
  id: string;
  creator?: string;
  creation_timestamp: number;
  last_updated_timestamp: number;
  description?: string;
  state: EndpointStateInfo;
  tags?: TagInfo[];
  task: "llm/v1/chat" | "llm/v1/completions" | "llm/v1/embeddings" | "llm/v1/score";
  permission_level: "CAN_MANAGE" | "CAN_QUERY" | "CAN_VIEW";
  config?: ConfigInfo;
  pending_config?: ConfigInfo;
  config_origin?: "api" | "command_line";
  pending_config_origin?: "api" | "command_line";
  rate_limits?: RateLimitInfo[];
  gateways?: GatewayState[];
  hosts?: HostedReplica[];
}

export interface EndpointInfos {
  endpoints: EndpointInfo[];
}

/** `message` says why an update failed. */
export interface EndpointStateInfo {
  ready: "READY" | "NOT_READY";
  config_update: "NOT_UPDATING" | "IN_PROGRESS" | "UPDATE_FAILED";
  message?: string;
}

/** The last lines of each replica's log. */
export interface EngineLogs {
  logs: string;
}

/** The progress of a served entity's engines. Callers who do not manage see its status and kernels alone. */
export interface EntityHealth {
  status: "starting" | "ready" | "draining" | "stalled" | "dead";
  steps?: number;
  last_step_age?: number;
  running?: number;
  waiting?: number;
  cpu_wait?: number;
  processor_wait?: number;
  kernels?: string;
  kernels_reason?: string;
  instruction_set?: string;
  quantization?: string;
  quantization_reason?: string;
  kv_cache_dtype?: string;
  kv_cache_reason?: string;
  max_num_batched_tokens?: number;
  paged?: PagedInfo;
  standbys?: number;
  memory?: number;
  unloaded?: string;
  start_seconds?: number | null;
}

/** A page of files, the newest first unless asked otherwise. */
export interface FileList {
  object: "list";
  data: FileObject[];
  first_id: string | null;
  last_id: string | null;
  has_more: boolean;
}

/** A file of requests, or of the replies of a batch. */
export interface FileObject {
  id: string;
  object: "file";
  bytes: number;
  created_at: number;
  expires_at: number | null;
  filename: string;
  purpose: "batch" | "batch_output";
  status: "processed";
}

export interface FunctionCall {
  id: string;
  type: "function";
  function: CalledFunction;
}

/** A piece of a call: the first one of a call has its id and name, and clients join the arguments of one index. */
export interface FunctionCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function: CalledFunctionDelta;
}

/** An endpoint as one gateway of the database serves it, by its last report. `config_version` is what all of its workers serve, `content_hash` that config's hash; `message` says why the gateway cannot serve the newest one. */
export interface GatewayState {
  gateway: string;
  state: "READY" | "NOT_READY" | "LOADING" | "STARTING" | "FAILED";
  config_version?: number;
  content_hash?: string;
  message?: string;
  adapters?: AdapterState[];
}

/** The rules for what requests say, and for what the model answers. */
export interface Guardrails {
  input: TextRules;
  output: TextRules;
}

/** An engine of a served entity on a joined host, by that host's last report. `address` is where a READY one answers, `message` why a FAILED one does not run, or what the start of its host waits for. */
export interface HostedReplica {
  served_entity: string;
  host: string;
  state: "LOADING" | "READY" | "FAILED";
  address?: string;
  message?: string;
}

/** A key without its secret. */
export interface KeyInfo {
  key_id: string;
  prefix: string;
  tenant: string;
  name: string;
  scopes: string[];
  created_ms: number;
  revoked_ms: number | null;
  expires_ms: number | null;
  endpoints: string[] | null;
  overlap_ms: number | null;
  weight: number;
  state: "active" | "expired" | "revoked";
}

export interface KeyList {
  keys: KeyInfo[];
}

/** A limit; money is a decimal string. */
export interface LimitInfo {
  scope: "key" | "tenant" | "endpoint" | "user" | "key_user" | "tenant_user" | "endpoint_user";
  subject: string;
  kind: "itpm" | "otpm" | "qpm" | "qph" | "in_flight" | "budget" | "budget_day" | "budget_month";
  value: number | string;
  end_user: string;
  soft: boolean;
  alert_at: number[] | null;
  unit: string;
}

/** The rest of a limit; `reset_seconds` is the time until all of it is free again, null if it never is. A `soft` limit refuses nothing: more than is `allowed` may be `used`. `alert_at` are the shares at which webhooks are told, those of the server included. `end_user` is null but for limits of the end user that was asked for. */
export interface LimitLeftInfo {
  scope: string;
  endpoint: string | null;
  end_user: string | null;
  kind: string;
  unit: string;
  soft: boolean;
  alert_at: number[];
  allowed: number | string;
  used: number | string;
  remaining: number | string;
  reset_seconds: number | null;
}

export interface LimitList {
  currency: string;
  limits: LimitInfo[];
}

/** A reason why the input of a batch is refused; `line` is null for one of the whole file. */
export interface LineError {
  code: string;
  line: number | null;
  message: string;
  param: string | null;
}

/** The reasons why the input of a batch is refused. */
export interface LineErrors {
  object: "list";
  data: LineError[];
}

/** An endpoint, or one of its adapters, which has its endpoint as `parent`. */
export interface ModelCard {
  id: string;
  object: "model";
  created: number;
  owned_by: string;
  parent?: string;
  root: string;
  max_model_len: number;
  served_models: ModelVersionServed[];
  sampling_defaults?: Record<string, unknown>;
}

/** An endpoint or adapter, as Anthropic's API lists models. */
export interface ModelInfo {
  type: "model";
  id: string;
  display_name: string;
  created_at: string;
  lifecycle: "active";
  max_input_tokens: number;
  max_tokens: number;
}

export interface ModelList {
  object: "list";
  data: ModelCard[];
}

export interface ModelPage {
  data: ModelInfo[];
  has_more: boolean;
  first_id: string | null;
  last_id: string | null;
}

/** A version of a model that answers for an endpoint. Its name in the registry is shown to those who manage. */
export interface ModelVersionServed {
  name: string;
  model_version?: string;
  content_hash?: string;
  model_name?: string;
}

/** A new key, and its secret, which is shown this once. */
export interface NewKey {
  secret: string;
  key: KeyInfo;
  /** likely mistakes */
  notes: string[];
}

/** The way in which a paged KV cache runs. - A block has `kv_block_size` tokens. - `attention`: decodes attend by "triton" or "torch" (`attention_reason`: why not by Triton). - `prefill`: chunks of prompts attend in one launch by torch's "varlen" operator or by "triton", or one after the other by "torch" (`prefill_reason`: why not by a kernel). - `cuda_graphs`: the sizes of decode steps that are recorded (`cuda_graphs_reason`: why none are). - `async_scheduling`: whether a step is launched before the tokens of the previous one are read (`async_scheduling_reason`: why not). - `products`: for each shape of linears in floats, outputs x inputs, the numbers of rows that our kernels multiply faster than torch, with both times (`products_reason`: why torch multiplies all). - `early_launch`: whether kernels begin while the one before still runs (`early_launch_reason`: why not). */
export interface PagedInfo {
  kv_block_size: number;
  attention: "triton" | "torch";
  attention_reason: string;
  prefill: "varlen" | "triton" | "torch";
  prefill_reason: string;
  cuda_graphs: number[];
  cuda_graphs_reason: string;
  async_scheduling: boolean;
  async_scheduling_reason: string;
  products: string[];
  products_reason: string;
  early_launch: boolean;
  early_launch_reason: string;
}

/** A request with its texts, as JSON. `codes` says why a text was left out; `sample` is the share that was logged. */
export interface PayloadInfo {
  request_id: string;
  endpoint: string;
  entity: string;
  adapter: string | null;
  tenant: string;
  key_id: string;
  client_request_id: string | null;
  status_code: number;
  started_ms: number;
  duration_ms: number;
  sample: number;
  model_version: string | null;
  shadow: boolean;
  request: string | null;
  response: string | null;
  codes: ("MAX_REQUEST_SIZE_EXCEEDED" | "MAX_RESPONSE_SIZE_EXCEEDED" | "REQUEST_NOT_JSON" | "REDACTION_FAILED")[];
}

/** The settings of an endpoint's payload log. An endpoint without them logs no text. Attributes: sample: share of the requests that are logged, above 0 and up to 1. max_rows: the most requests that are kept; the oldest ones go first. max_bytes: the most bytes of texts that are kept. max_age: seconds after which a request is deleted. redact: regular expressions (RE2). What they match in a text is replaced before anything is stored. */
export interface PayloadLog {
  sample: number;
  max_rows: number;
  max_bytes: number;
  max_age: number;
  /** a list of at most 20 regular expressions in RE2's syntax */
  redact: string[];
}

/** A page of requests, the newest first. A `next_cursor` of null means that this is the last page. */
export interface PayloadPage {
  payloads: PayloadInfo[];
  next_cursor: string | null;
}

/** The treatment of personal data, and the kinds of it that are looked for (all of them). */
export interface Pii {
  behavior: "NONE" | "BLOCK" | "MASK";
  types: ("email" | "iban" | "credit_card" | "us_ssn" | "ip_address" | "phone")[];
}

/** Prices per million tokens, and per provisioned token/s for a minute, from a time on. */
export interface PriceInfo {
  entity: string;
  effective_ms: number;
  /** a decimal number, in currency units */
  input: string;
  /** a decimal number, in currency units */
  cached: string;
  /** a decimal number, in currency units */
  output: string;
  /** a decimal number, in currency units */
  unit_minute: string;
}

export interface PriceList {
  currency: string;
  prices: PriceInfo[];
}

/** The prices of a served model, in currency units. */
export interface PriceNow {
  endpoint: string;
  served_model: string;
  /** a decimal number, in currency units */
  input: string;
  /** a decimal number, in currency units */
  cached: string;
  /** a decimal number, in currency units */
  output: string;
  /** a decimal number, in currency units */
  unit_minute: string;
}

/** A version of a prompt. `template` is a text or the messages of a chat; `versions` are the newest ones. */
export interface PromptDetails {
  name: string;
  version: number;
  template: string | PromptMessage[];
  variables: string[];
  commit_message: string;
  response_format: Record<string, unknown> | null;
  model_config: Record<string, unknown> | null;
  versions: PromptVersionInfo[];
}

/** A prompt of the registry. */
export interface PromptInfo {
  name: string;
  description: string;
}

/** Prompts by name; `more` says that there are others. */
export interface PromptList {
  prompts: PromptInfo[];
  more: boolean;
}

/** A message of a chat prompt, with variables such as `{{name}}`. */
export interface PromptMessage {
  role: string;
  content: string;
}

export interface PromptTokensDetails {
  cached_tokens: number;
}

/** The counted tokens of a request that generates none. */
export interface PromptUsage {
  prompt_tokens: number;
  total_tokens: number;
}

export interface PromptVersionInfo {
  version: number;
  commit_message: string;
  created_ms: number | null;
}

export interface RateLimitInfo {
  calls: number;
  key: "endpoint" | "user";
  renewal_period: "minute";
}

/** The part of generated tokens that is reasoning, which is not counted separately here: always 0. */
export interface ReasoningTokens {
  reasoning_tokens: number;
}

/** A request without its texts; a running one has the counts of its last checkpoint. `has_payload` says whether the payload log has its texts. */
export interface RecentRequest {
  request_id: string;
  key_id: string;
  tenant: string;
  endpoint: string;
  entity: string;
  adapter: string | null;
  task: string;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  started_ms: number;
  ended_ms: number | null;
  finish_reason: string | null;
  status: string;
  has_payload: boolean;
}

/** The newest requests, and the ledger's time. */
export interface RecentRequests {
  now_ms: number;
  requests: RecentRequest[];
}

/** The number of requests of a batch. */
export interface RequestCounts {
  total: number;
  completed: number;
  failed: number;
}

/** Provisioned throughput, in tokens/s times minutes. */
export interface ReservedInfo {
  tenant: string;
  endpoint: string;
  entity: string;
  unit_minutes: number;
  /** a decimal number, in currency units */
  cost: string;
}

export interface RouteInfo {
  served_model_name: string;
  served_entity_name: string;
  traffic_percentage: number;
}

/** The hosts that a runtime starts for the engines of an entity. Each runs one replica. Attributes: runtime: the cluster that starts the hosts, ends them and replaces them when their nodes die. min: the fewest hosts. max: the most hosts; between the two, their number follows the load. None is as many as `min`. resources: what each host takes of a node of the cluster, by the cluster's names; `memory` is in bytes. */
export interface Scale {
  runtime: "ray";
  min: number;
  max: number | null;
  /** at most 16 names of resources with amounts, such as {"GPU": 1} */
  resources: Record<string, number>;
}

/** A token of the text, with the likeliest tokens at its place. */
export interface ScoredToken {
  token: string;
  logprob: number | null;
  bytes: number[];
  top_logprobs: AlternativeToken[];
}

/** A scorer of MLflow's that judges whole texts: `module:name`. `on_error` says what its failure means for a text, and so does one that takes more than `timeout` seconds. */
export interface ScorerRule {
  scorer: string;
  on_error: "BLOCK" | "PASS";
  timeout: number;
}

/** A served entity as it was asked for, and the model that was found for it. */
export interface ServedEntityInfo {
  name: string;
  entity_name: string;
  entity_version: string;
  min_provisioned_throughput?: number;
  max_provisioned_throughput?: number;
  scale_to_zero_enabled: boolean;
  engine_settings?: Record<string, unknown>;
  defaults?: Record<string, unknown>;
  follow_alias?: boolean;
  canary?: Canary;
  canary_of?: string;
  shadow?: Shadow;
  placement?: "local" | "hosts";
  replicas?: number;
  scale?: Scale;
  resolved_name?: string;
  resolved_version?: string;
  content_hash?: string;
  request_defaults?: Record<string, unknown>;
  state: DeploymentState;
}

/** The same under Databricks' older names. */
export interface ServedModelInfo {
  name: string;
  model_name: string;
  model_version: string;
  state: DeploymentState;
}

export interface ServedModelName {
  name: string;
  provider: "mlflow-llm";
}

/** Without a key, on a server that requires one, only `status` is shown. */
export interface ServerHealth {
  status: "OK" | "UNHEALTHY";
  endpoints?: Record<string, EndpointHealth>;
}

/** The settings of a served entity that gets copies of requests, and no traffic. Attributes: sample: share of the endpoint's admitted requests that are copied, above 0 and up to 1. max_queued: copies that wait in each worker; further ones are dropped, and counted. max_concurrent: copies that run at once for each worker. */
export interface Shadow {
  sample: number;
  max_queued: number;
  max_concurrent: number;
}

export interface TagInfo {
  key: string;
  value: string;
}

export interface TextChoice {
  index: number;
  text: string;
  logprobs: TextLogprobs | null;
  finish_reason: "stop" | "length" | "tool_calls" | "content_filter";
}

/** The data of an event of streamed completions. */
export interface TextChunk {
  id: string;
  object: "text_completion";
  created: number;
  model: string;
  choices: TextChunkChoice[];
  usage?: CompletionUsage | null;
}

export interface TextChunkChoice {
  index: number;
  text: string;
  logprobs: TextLogprobs | null;
  finish_reason: "stop" | "length" | "tool_calls" | "content_filter" | null;
}

/** The reply to one or more prompts. */
export interface TextCompletion {
  id: string;
  object: "text_completion";
  created: number;
  model: string;
  choices: TextChoice[];
  usage: CompletionUsage;
}

/** Parallel lists with an entry for each token. */
export interface TextLogprobs {
  tokens: string[];
  token_logprobs: (number | null)[];
  top_logprobs: (Record<string, number | null> | null)[];
  text_offset: number[];
}

/** The rules for texts, in the form of Databricks' AI Gateway. One of `invalid_keywords` blocks a text. */
export interface TextRules {
  invalid_keywords: string[];
  pii: Pii;
  safety: boolean;
  scorers: ScorerRule[];
}

export interface TrafficInfo {
  routes: RouteInfo[];
  sticky?: boolean;
}

/** A page of rows, oldest first. A `next_cursor` of null means that this is the last page so far. */
export interface UsagePageInfo {
  currency: string;
  usage: UsageRowInfo[];
  next_cursor: string | null;
}

/** A request. Its money is in decimal strings; an open row has the counts of its last checkpoint. */
export interface UsageRowInfo {
  request_id: string;
  key_id: string;
  tenant: string;
  endpoint: string;
  entity: string;
  adapter: string | null;
  mode: string;
  task: string;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  generated_tokens: number;
  draft_tokens: number;
  accepted_draft_tokens: number;
  /** a decimal number, in currency units */
  price_input: string;
  /** a decimal number, in currency units */
  price_cached: string;
  /** a decimal number, in currency units */
  price_output: string;
  /** a decimal number, in currency units */
  cost: string;
  started_ms: number;
  ended_ms: number | null;
  finish_reason: string | null;
  status: string;
  model_version: string | null;
  content_hash: string | null;
  end_user: string | null;
  client_request_id: string | null;
  tags: Record<string, string> | null;
  adapter_hash: string | null;
}

/** The sum of a group of requests; columns that were not grouped by are left out. */
export interface UsageSumInfo {
  day?: string | null;
  hour?: string | null;
  tenant?: string | null;
  endpoint?: string | null;
  entity?: string | null;
  adapter?: string | null;
  key_id?: string | null;
  model_version?: string | null;
  content_hash?: string | null;
  end_user?: string | null;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  generated_tokens: number;
  draft_tokens: number;
  accepted_draft_tokens: number;
  /** a decimal number, in currency units */
  cost: string;
}
