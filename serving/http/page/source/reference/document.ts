/** What the reference reads of the server's OpenAPI document, and examples made from its schemas. */

export interface Schema {
  $ref?: string;
  type?: string | string[];
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  example?: unknown;
  examples?: unknown[];
  description?: string;
  anyOf?: Schema[];
  oneOf?: Schema[];
  allOf?: Schema[];
  minimum?: number;
  exclusiveMinimum?: number;
}

export interface Parameter {
  name: string;
  in: "path" | "query" | "header";
  required?: boolean;
  schema: Schema;
}

export interface Media {
  schema?: Schema;
  example?: unknown;
  examples?: Record<string, { value?: unknown }>;
}

export interface Operation {
  operationId: string;
  summary: string;
  tags: string[];
  parameters: Parameter[];
  requestBody?: { content: Record<string, Media> };
  responses: Record<string, { description: string; content?: Record<string, Media> }>;
}

export interface OpenApi {
  paths: Record<string, Record<string, Operation>>;
  components: { schemas: Record<string, Schema> };
}

export interface Listed {
  method: string;
  path: string;
  operation: Operation;
}

export function operationsOf(document: OpenApi): Listed[] {
  return Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ method: method.toUpperCase(), path, operation })),
  );
}

export function resolved(document: OpenApi, schema: Schema): Schema {
  const name = schema.$ref?.split("/").pop();
  return name === undefined ? schema : (document.components.schemas[name] ?? {});
}

/** Return the example of a JSON body: the document's own, else one of the schema's required fields. */
export function exampleOf(document: OpenApi, media: Media, model: string): unknown {
  const [named] = Object.values(media.examples ?? {});
  const found = media.example ?? named?.value;
  const value = found ?? made(document, media.schema ?? {}, 0);
  if (typeof value !== "object" || value === null || Array.isArray(value) || !model) return value;
  const fields = resolved(document, media.schema ?? {});
  const shapes = [fields, ...(fields.oneOf ?? []).map((one) => resolved(document, one))];
  if (!shapes.some((one) => one.properties?.["model"])) return value;
  const short = shapes.some((one) => one.properties?.["max_tokens"]) ? { max_tokens: 32 } : {};
  return { model, ...short, ...value, ...("model" in value ? { model } : {}) };
}

const DEPTH = 6;

function made(document: OpenApi, given: Schema, depth: number): unknown {
  const schema = resolved(document, given);
  if (schema.example !== undefined) return schema.example;
  if (schema.examples?.length) return schema.examples[0];
  if (schema.const !== undefined) return schema.const;
  if (schema.enum?.length) return schema.enum[0];
  const options = schema.anyOf ?? schema.oneOf;
  if (schema.properties === undefined && options?.length) return made(document, options[0] as Schema, depth);
  const type = Array.isArray(schema.type) ? schema.type[0] : schema.type;
  if (depth > DEPTH) return null;
  if (type === "object" || schema.properties !== undefined) {
    const required = schema.required ?? [];
    const entries = required.map((name) => [name, valueOf(document, name, schema.properties?.[name] ?? {}, depth)]);
    return Object.fromEntries(entries) as unknown;
  }
  if (type === "array") return schema.items === undefined ? [] : [made(document, schema.items, depth + 1)];
  if (type === "integer" || type === "number") return schema.minimum ?? 1;
  if (type === "boolean") return false;
  return type === "null" ? null : "text";
}

// a conversation is more useful than a message of the schema's first kind
const KNOWN: Record<string, unknown> = { messages: [{ role: "user", content: "Say hello." }], prompt: "Once upon a time" };

function valueOf(document: OpenApi, name: string, schema: Schema, depth: number): unknown {
  return depth === 0 && name in KNOWN ? KNOWN[name] : made(document, schema, depth + 1);
}

export interface Field {
  name: string;
  type: string;
  required: boolean;
  about: string;
}

/** Return the fields of a schema; of one with several shapes, those of all of them. */
export function fieldsOf(document: OpenApi, given: Schema): Field[] {
  const schema = resolved(document, given);
  const shapes = [schema, ...(schema.oneOf ?? []), ...(schema.anyOf ?? []), ...(schema.allOf ?? [])];
  const found = new Map<string, Field>();
  for (const shape of shapes.map((one) => resolved(document, one))) {
    for (const [name, inner] of Object.entries(shape.properties ?? {})) {
      const required = shape.required?.includes(name) ?? false;
      if (!found.has(name)) {
        found.set(name, { name, type: typeOf(document, inner), required, about: resolved(document, inner).description ?? "" });
      }
    }
  }
  return [...found.values()];
}

export function typeOf(document: OpenApi, given: Schema): string {
  const schema = resolved(document, given);
  if (schema.enum !== undefined) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const options = schema.anyOf ?? schema.oneOf;
  if (options !== undefined) return [...new Set(options.map((one) => typeOf(document, one)))].join(" | ");
  const type = Array.isArray(schema.type) ? schema.type.join(" | ") : (schema.type ?? "any");
  return type === "array" && schema.items !== undefined ? `array of ${typeOf(document, schema.items)}` : type;
}
