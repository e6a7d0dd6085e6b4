import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.util.Arrays;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.server.datanode.DataNode;
import org.apache.hadoop.hdfs.server.namenode.NameNode;
import org.apache.hadoop.metrics2.lib.DefaultMetricsSystem;

/**
 * Real HDFS servers in one JVM, on loopback, which obey lines on standard input.
 *
 * <p>Arguments: HOME N BIND:PORT,PORT,... key=value... with the ports of N DataNodes, where BIND is
 * the address that all listen on, or "apart" (DataNode I on 127.0.1.(I+1), while the NameNode still
 * hands out 127.0.0.1, so that a relay can stand between).
 *
 * <p>Prints "READY rpcPort httpPort dataPort..." when all serve. Each line is then answered with
 * "OK" or "ERROR reason"; "quit" or the end of input ends the process.
 */
abstract class HdfsServers {
  final String home;
  final Configuration conf = new HdfsConfiguration();
  final DataNode[] dataNodes;
  private final boolean apart;
  private final String address;
  private final int[] ports;

  /** The {@code defaults} are key=value, too; the arguments win. */
  HdfsServers(String[] arguments, String... defaults) {
    home = arguments[0];
    dataNodes = new DataNode[Integer.parseInt(arguments[1])];
    String[] bind = arguments[2].split(":");
    apart = bind[0].equals("apart");
    address = apart ? "127.0.0.1" : bind[0];
    ports = Arrays.stream(bind[1].split(",")).mapToInt(Integer::parseInt).toArray();
    conf.set("hadoop.tmp.dir", home + "/tmp");
    set(defaults);
    set(Arrays.copyOfRange(arguments, 3, arguments.length));
  }

  private void set(String[] values) {
    for (String value : values) {
      int equals = value.indexOf('=');
      conf.set(value.substring(0, equals), value.substring(equals + 1));
    }
  }

  abstract void startNameNodes() throws Exception;

  abstract NameNode[] nameNodes();

  /** What one line asks, in words. */
  abstract void obey(String[] words) throws Exception;

  void startDataNode(int index) throws Exception {
    File folder = new File(home, "datanode" + index);
    folder.mkdirs();
    Configuration own = new HdfsConfiguration(conf);
    String listening = apart ? "127.0.1." + (index + 1) : address;
    own.set("dfs.datanode.data.dir", "file://" + folder);
    own.set("dfs.datanode.data.dir.perm", "700");
    own.set("dfs.datanode.address", listening + ":" + ports[index]);
    own.set("dfs.datanode.http.address", "127.0.0.1:0");
    own.set("dfs.datanode.ipc.address", "127.0.0.1:0");
    own.set("dfs.datanode.hostname", address);
    dataNodes[index] = DataNode.createDataNode(new String[0], own);
  }

  static void waitForDataNodes(NameNode nameNode, int count) throws Exception {
    while (nameNode.isInSafeMode() || nameNode.getNamesystem().getNumLiveDataNodes() < count) {
      Thread.sleep(20);
    }
  }

  private void startDataNodes() throws Exception {
    Thread[] threads = new Thread[dataNodes.length];
    Exception[] failures = new Exception[dataNodes.length];
    for (int i = 0; i < threads.length; i++) {
      final int index = i;
      threads[i] = new Thread(() -> {
        try {
          startDataNode(index);
        } catch (Exception error) {
          failures[index] = error;
        }
      });
      threads[i].start();
    }
    for (int i = 0; i < threads.length; i++) {
      threads[i].join();
      if (failures[i] != null) {
        throw failures[i];
      }
    }
  }

  private String start() throws Exception {
    startNameNodes();
    startDataNodes();
    for (NameNode nameNode : nameNodes()) {
      waitForDataNodes(nameNode, dataNodes.length);
    }
    NameNode first = nameNodes()[0];
    StringBuilder ready = new StringBuilder("READY " + first.getNameNodeAddress().getPort());
    ready.append(" ").append(first.getHttpAddress().getPort());
    for (int port : ports) {
      ready.append(" ").append(port);
    }
    return ready.toString();
  }

  private static void say(String line) {
    System.out.println(line);
    System.out.flush();
  }

  /** Start all, and obey; does not return. */
  void run() throws Exception {
    DefaultMetricsSystem.setMiniClusterMode(true); // else the second DataNode's metrics clash
    try {
      say(start());
      BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
      String line;
      while ((line = input.readLine()) != null && !line.equals("quit")) {
        try {
          obey(line.trim().split(" "));
          say("OK");
        } catch (Exception error) {
          say("ERROR " + error);
        }
      }
    } catch (Exception error) {
      error.printStackTrace();
    } finally {
      Runtime.getRuntime().halt(0); // an orderly shutdown of all servers takes many seconds
    }
  }
}
